"""The writer: one pipeline for all, answers to each, and no fence seen where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from contracts.entries import Accepted, Entry, SealAfter, StreamEntry, Terminal, Text
from contracts.stream_ids import SEAL, StreamId
from contracts.tiers import Status
from contracts.token_stream import Appended, StreamsUnavailable
from workers.leases import fate
from workers.writer import StreamWriter, settled

DONE = Terminal(status=Status.COMPLETED)


class Streams:
    """Last ids only, by the rule of Redis; answers can be lost before or after they are applied."""

    def __init__(self, *ids: str) -> None:
        self.last: dict[str, StreamId] = dict.fromkeys(ids, StreamId(0, 3))
        self.calls: list[list[StreamId]] = []
        self.lose_before = 0
        self.lose_after = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def append(self, writes: Sequence[tuple[str, StreamId, Entry]]) -> list[Appended]:
        await self.gate.wait()
        if self.lose_before:
            self.lose_before -= 1
            raise StreamsUnavailable("before")
        self.calls.append([entry_id for _, entry_id, _ in writes])
        results = [self._append(rid, entry_id) for rid, entry_id, _ in writes]
        if self.lose_after:
            self.lose_after -= 1
            raise StreamsUnavailable("after")
        return results

    def _append(self, rid: str, entry_id: StreamId) -> Appended:
        last = self.last.get(rid)
        if last is None:
            return Appended.GONE
        if last == SEAL:
            return Appended.SEALED
        if entry_id <= last:
            return Appended.FENCED
        self.last[rid] = entry_id
        return Appended.OK

    async def last_ids(self, request_ids: Sequence[str]) -> list[StreamId | None]:
        return [self.last.get(r) for r in request_ids]

    async def create(self, request_id: str, accepted: Accepted) -> None:
        raise NotImplementedError

    async def seal(self, request_id: str, terminal: Terminal) -> Appended:
        raise NotImplementedError

    async def read(self, request_id: str, after: StreamId, limit: int) -> list[StreamEntry]:
        raise NotImplementedError


class Sink:
    def __init__(self, request_id: str, attempt: int = 1) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.answers: list[StreamId | Appended | None] = []
        self.closed = False

    def appended(self, entry_id: StreamId) -> None:
        self.answers.append(entry_id)

    def refused(self, result: Appended | None) -> None:
        self.answers.append(result)
        self.closed = True


@asynccontextmanager
async def running(
    streams: Streams, give_up: float = 5.0, limit: int = 100
) -> AsyncIterator[StreamWriter]:
    writer = StreamWriter(streams, give_up_seconds=give_up, limit=limit)
    task = asyncio.create_task(writer.run())
    try:
        yield writer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def text(n: int, attempt: int = 1) -> tuple[StreamId, Text]:
    return StreamId(attempt, n), Text("x", (n,))


async def test_entries_that_gather_during_a_flush_go_out_together() -> None:
    streams, sinks = Streams("a", "b"), [Sink("a"), Sink("b")]
    streams.gate.clear()
    async with running(streams) as writer:
        writer.put(sinks[0], *text(1))
        await asyncio.sleep(0)
        for sink in sinks:
            for n in (2, 3):
                writer.put(sink, *text(n))
        writer.put(sinks[0], SEAL, DONE)
        streams.gate.set()
        await until(lambda: len(sinks[0].answers) == 4)
    assert len(streams.calls) <= 2
    assert sinks[0].answers == [StreamId(1, 1), StreamId(1, 2), StreamId(1, 3), SEAL]
    assert sinks[1].answers == [StreamId(1, 2), StreamId(1, 3)]


async def test_an_append_applied_before_its_answer_was_lost_is_no_fence() -> None:
    streams, sink = Streams("a"), Sink("a")
    streams.lose_after = 1
    async with running(streams) as writer:
        writer.put(sink, *text(1))
        writer.put(sink, *text(2))
        await until(lambda: len(sink.answers) == 2)
    assert sink.answers == [StreamId(1, 1), StreamId(1, 2)]
    assert len(streams.calls) == 1


async def test_an_append_that_never_arrived_is_repeated() -> None:
    streams, sink = Streams("a"), Sink("a")
    streams.lose_before = 2
    async with running(streams) as writer:
        writer.put(sink, *text(1))
        await until(lambda: bool(sink.answers))
    assert sink.answers == [StreamId(1, 1)]


async def test_another_attempt_fences_and_what_follows_is_dropped() -> None:
    streams, old, other = Streams("a", "b"), Sink("a"), Sink("b")
    streams.last["a"] = StreamId(2, 0)
    async with running(streams) as writer:
        writer.put(old, *text(1))
        writer.put(old, *text(2))
        writer.put(other, *text(1))
        await until(lambda: bool(old.answers) and bool(other.answers))
        writer.put(old, *text(3))
        writer.put(other, *text(2))
        await until(lambda: len(other.answers) == 2)
    assert old.answers == [Appended.FENCED]
    assert streams.last["a"] == StreamId(2, 0)


async def test_a_sealed_and_a_lost_stream_are_told_apart() -> None:
    streams, sealed, gone = Streams("a"), Sink("a"), Sink("nothere")
    streams.last["a"] = SEAL
    async with running(streams) as writer:
        writer.put(sealed, *text(1))
        writer.put(gone, *text(1))
        await until(lambda: bool(sealed.answers) and bool(gone.answers))
    assert (sealed.answers, gone.answers) == ([Appended.SEALED], [Appended.GONE])


async def test_a_store_that_stays_away_gives_the_replies_up() -> None:
    streams, sink = Streams("a"), Sink("a")
    streams.lose_before = 10_000
    async with running(streams, give_up=0.0) as writer:
        writer.put(sink, *text(1))
        await until(lambda: bool(sink.answers))
    assert sink.answers == [None]


async def test_a_full_writer_makes_replies_wait_F1() -> None:
    streams, sink = Streams("a"), Sink("a")
    streams.gate.clear()
    async with running(streams, limit=3) as writer:
        for n in range(1, 6):
            writer.put(sink, *text(n))
        assert writer.full
        waiting = asyncio.create_task(writer.room())
        await asyncio.sleep(0)
        streams.gate.set()
        async with asyncio.timeout(5):
            await waiting
    assert not writer.full


@pytest.mark.parametrize(
    ("last", "entry_id", "verdict"),
    [
        (None, StreamId(1, 1), Appended.GONE),
        (SEAL, StreamId(1, 1), Appended.SEALED),
        (SEAL, SEAL, Appended.SEALED),
        (StreamId(1, 4), StreamId(1, 5), None),
        (StreamId(1, 5), StreamId(1, 5), Appended.OK),
        (StreamId(2, 0), StreamId(1, 5), Appended.FENCED),
        (StreamId(1, 0), StreamId(1, 0), Appended.FENCED),
    ],
)
def test_the_last_id_says_what_became_of_an_append(
    last: StreamId | None, entry_id: StreamId, verdict: Appended | None
) -> None:
    assert settled(last, entry_id, Text("x")) is verdict


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        (None, Appended.GONE),
        (SEAL, Appended.SEALED),
        (StreamId(1, 3), None),
        (StreamId(2, 0), Appended.FENCED),
        (StreamId(1, 2), Appended.FENCED),
    ],
)
def test_a_seal_is_written_again_only_behind_the_text_it_belongs_to(
    last: StreamId | None, verdict: Appended | None
) -> None:
    seal = SealAfter(Terminal(status=Status.COMPLETED), StreamId(1, 3))
    assert settled(last, SEAL, seal) is verdict


def test_the_last_id_says_what_became_of_an_attempt() -> None:
    assert fate(StreamId(1, 9), 1) is Appended.OK
    assert fate(StreamId(2, 0), 1) is Appended.FENCED
    assert fate(SEAL, 1) is Appended.SEALED
    assert fate(None, 1) is Appended.GONE
