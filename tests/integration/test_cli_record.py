"""``headrace record``: token streams in a real Redis, with the times of their entries."""

from __future__ import annotations

import asyncio
import io
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from contracts.absence import NOBODY
from contracts.entries import Accepted, Terminal, Text
from contracts.identity import make_request_id
from contracts.reply import Reply
from contracts.stream_ids import StreamId
from contracts.tiers import FinishReason, Status
from infra.cli.record import record_to
from infra.presence_redis import ReaderPresence
from infra.replay import recorder_redis
from infra.replay.recorder_redis import Recorder
from infra.replay.recordings import read_recordings
from infra.replay.turns import Wanted
from infra.settings import Settings
from infra.stack.errors import StackError
from infra.stream_redis import RedisTokenStreams, connect
from infra.tasks import end_tasks
from tests.edge_kit import eventually

DONE = Terminal(status=Status.COMPLETED, finish_reasons=[FinishReason.STOP])


class Rig:
    """Writes streams, and records them."""

    def __init__(self, settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
        self.settings = settings
        self.client = connect(settings.redis)
        self.streams = RedisTokenStreams(self.client, settings.streams)
        self.file = io.StringIO()
        self.told = ""
        self.recorders: list[Recorder] = []
        self._capsys = capsys

    async def noticed(self, count: int) -> None:
        """Wait until so many requests are being recorded."""
        await eventually(lambda: len(self.recorders[-1].unfinished()) == count)

    def has_told(self, text: str) -> bool:
        self.told += self._capsys.readouterr().err
        return text in self.told

    async def open(self, model: str = "m") -> str:
        now_ms = int(time.time() * 1000)
        request_id = make_request_id(now_ms, secrets.token_bytes(10))
        accepted = Accepted(tenant="acme", tier="paid", model=model, created_ms=now_ms)
        await self.streams.create(request_id, accepted)
        return request_id

    async def write(self, request_id: str, pieces: list[str], first: int = 1) -> None:
        items = [
            (request_id, StreamId(1, n), Text(piece, (n,))) for n, piece in enumerate(pieces, first)
        ]
        await self.streams.append(items)

    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()

    @asynccontextmanager
    async def recording(self, limit: int | None = None, redact: bool = False) -> AsyncIterator[None]:
        work = record_to(self.file, self.settings, Wanted(model="m"), redact=redact, limit=limit)
        task = asyncio.create_task(work)
        try:
            await eventually(lambda: self.has_told("recording"))
            yield
            if limit is not None:
                async with asyncio.timeout(10):
                    assert await task == 0
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.has_told("")


@pytest.fixture
async def rig(
    settings: Callable[..., Settings],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Rig]:
    made = Rig(settings(), capsys)

    class Watched(Recorder):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            made.recorders.append(self)

    monkeypatch.setattr("infra.cli.record.Recorder", Watched)
    yield made
    await made.client.aclose()


async def test_what_is_accepted_from_now_on_is_recorded_as_it_is_written(rig: Rig) -> None:
    before = await rig.open()
    async with rig.recording(limit=2):
        other, first, second = await rig.open("other"), await rig.open(), await rig.open()
        await rig.noticed(2)
        for number in range(3):
            for request_id in (before, first, other, second):
                await rig.write(request_id, [f"{number} ", "x" * 100], first=2 * number + 1)
        for request_id in (before, other, second, first):
            await rig.streams.seal(request_id, DONE)
            if request_id == second:
                await eventually(lambda: len(rig.lines()) == 1)
    read = read_recordings(rig.lines())
    assert [one.request_id for one in read.found] == [second, first]
    assert (read.unreadable, read.incomplete) == (0, 0)
    for one in read.found:
        assert [item for _, item in one.entries] == await rig.streams.read_all(one.request_id)
    assert rig.has_told("2 replies recorded, 0 missed")


async def test_what_has_not_ended_is_written_as_far_as_it_came(rig: Rig) -> None:
    async with rig.recording(redact=True):
        request_id = await rig.open()
        await rig.write(request_id, ["Hello", " Ada"])
        later = await rig.open()
        await rig.noticed(2)
        await rig.streams.seal(later, DONE)
        await eventually(lambda: rig.lines())
    _, line = rig.lines()
    assert "Ada" not in line
    assert "acme" not in line
    read = read_recordings([line])
    assert read.incomplete == 1
    assert Reply().extend(item for _, item in read.found[0].entries).text == "xxxxx xxx"


async def test_entries_have_the_times_at_which_they_came_and_nobody_counts_as_a_reader(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_redis, "_MOST_AT_ONCE", 1)
    begun = asyncio.Event()
    reader = connect(rig.settings.redis, blocking=True)
    recorder = Recorder(rig.client, reader, Wanted(), begun.set, lambda _: None)
    work = asyncio.create_task(recorder.run())
    try:
        async with asyncio.timeout(10):
            await begun.wait()
        request_id = await rig.open()
        for number in (1, 2, 3):
            await rig.write(request_id, ["x"], first=number)
            # The accepted entry, and the text so far.
            await eventually(partial(_has_entries, recorder, 1 + number))
            await asyncio.sleep(0.03)  # what is measured, at the least
        await rig.open()
        await eventually(lambda: recorder.missed == 1)
        times = [at_ms for at_ms, _ in recorder.unfinished()[0].entries]
        assert min(after - before for before, after in pairwise(times[1:])) >= 29
        assert (await ReaderPresence(rig.client).look([request_id]))[1] == [NOBODY]
    finally:
        await end_tasks([work])
        await reader.aclose()


def _has_entries(recorder: Recorder, count: int) -> bool:
    return [len(one.entries) for one in recorder.unfinished()] == [count]


async def test_a_redis_that_is_away_is_one_line(settings: Callable[..., Settings]) -> None:
    made = settings(redis={"url": "redis://127.0.0.1:1/0"})
    with pytest.raises(StackError, match="Redis: ConnectionError"):
        await record_to(io.StringIO(), made, Wanted(), redact=False, limit=None)
