"""Rings reach who listens, are kept while they cannot be answered, and never disturb who rings."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.protocol.fetch import FetchRequest

from infra import doorbell
from infra.doorbell import Doorbell, Partition, Ringer, fetch_when_rung

#: What has been rung is heard by then.
_SHORT = 0.05
_A, _B = ("requests", 0), ("requests", 1)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that nobody rings for does not end while a test looks."""
    monkeypatch.setattr(doorbell, "UNRUNG_SECONDS", 60.0)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, as sockets need."""
    with TemporaryDirectory(prefix="headrace-") as name:
        yield Path(name)


@pytest.fixture
def ringer(folder: Path) -> Iterator[Ringer]:
    it = Ringer(folder)
    yield it
    it.close()


def _sockets(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_socket()]


async def _listening(folder: Path, *partitions: Partition) -> Doorbell:
    """A doorbell of logs that are known to be empty."""
    doorbell = Doorbell(folder)
    doorbell.listen(set(partitions))
    doorbell.ends |= dict.fromkeys(partitions, 0)
    return doorbell


async def _rang(
    doorbell: Doorbell, positions: dict[Partition, int], within: float = 10.0
) -> set[Partition] | None:
    """What a wait that begins now says; None = it does not end within so many seconds."""
    waiting = asyncio.ensure_future(doorbell.wait(positions))
    await asyncio.wait({waiting}, timeout=within)
    found = waiting.result() if waiting.done() else None
    waiting.cancel()
    return found


async def test_a_ring_tells_all_who_listen_of_a_record_until_they_have_it(
    folder: Path, ringer: Ringer
) -> None:
    bells = [await _listening(folder, _A), await _listening(folder, _A)]
    ringer.ring(_A, 6)
    for bell in bells:
        assert await _rang(bell, {_A: 6}) == {_A}
        assert await _rang(bell, {_A: 6}) == {_A}
        assert await _rang(bell, {_A: 7}, within=_SHORT) is None
        bell.close()


async def test_a_ring_for_another_partition_is_not_heard(folder: Path, ringer: Ringer) -> None:
    bell = await _listening(folder, _A)
    ringer.ring(_B, 0)
    assert await _rang(bell, {_A: 0}, within=_SHORT) is None
    bell.close()


async def test_a_ring_that_a_fetch_left_out_wakes_nobody_and_is_kept_for_the_next(
    folder: Path, ringer: Ringer
) -> None:
    bell = await _listening(folder, _A, _B)
    ringer.ring(_A, 0)
    assert await _rang(bell, {_B: 0}, within=_SHORT) is None
    assert await _rang(bell, {_A: 0, _B: 0}) == {_A}
    bell.close()


async def test_nothing_is_known_of_a_partition_that_was_taken_away_and_came_back(
    folder: Path, ringer: Ringer
) -> None:
    bell = await _listening(folder, _A, _B)
    ringer.ring(_A, 9)
    assert await _rang(bell, {_A: 3}) == {_A}
    bell.listen({_B})
    assert len(_sockets(folder)) == 1
    bell.listen({_A, _B})
    assert bell.ends.keys() == {_B}
    bell.close()


async def test_ringing_where_nobody_listens_or_somebody_died_is_harmless(
    folder: Path, ringer: Ringer
) -> None:
    ringer.ring(_A, 0)
    bell = await _listening(folder, _A)
    (path,) = _sockets(folder)
    bell.close()
    assert not _sockets(folder)
    os.mknod(path)  # what a killed process leaves: a name that nobody answers
    ringer.ring(_A, 0)
    assert not path.exists()


async def test_a_ringer_does_not_wait_for_one_who_does_not_listen_any_more(
    folder: Path, ringer: Ringer
) -> None:
    """A frozen consumer's socket fills up."""
    bell = await _listening(folder, _A)
    for offset in range(10_000):
        ringer.ring(_A, offset)
    assert await _rang(bell, {_A: 0}) == {_A}
    bell.close()


class Client:
    """A Kafka client whose broker's log of each partition ends at ``end``."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.waits_ms: list[int] = []
        self.asked: list[list[int]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def send(self, _node: object, request: Any) -> Any:
        self.waits_ms.append(request._max_wait_ms)
        [(topic, those)] = request.topics
        self.asked.append([partition for partition, *_ in those])
        end = self.end
        await self.may_answer.wait()
        return SimpleNamespace(topics=[(topic, [(n, 0, end, -1, None, b"") for n, *_ in those])])

    async def close(self) -> None: ...


class Reader:
    """A consumer of partitions 0 and 1 that fetches when rung for."""

    def __init__(self, folder: Path, end: int) -> None:
        self.client = Client(end)
        self._consumer: Any = SimpleNamespace(_client=self.client, assignment=lambda: {_A, _B})
        fetch_when_rung(self._consumer, folder)

    async def fetch(self, *offsets: int) -> None:
        """A fetch from these offsets of partitions 0, 1, …"""
        wanted = [(partition, offset, 1 << 20) for partition, offset in enumerate(offsets)]
        request = FetchRequest(3, 1, 1 << 20, 0, [("requests", wanted)])
        await asyncio.wait_for(self._consumer._client.send(0, request), 10)

    async def close(self) -> None:
        await self._consumer._client.close()


@pytest.fixture
async def reader(folder: Path) -> AsyncIterator[Reader]:
    it = Reader(folder, 7)
    yield it
    await it.close()


async def _waits(fetching: asyncio.Future[None]) -> bool:
    await asyncio.wait({fetching}, timeout=_SHORT)
    return not fetching.done()


async def test_what_is_known_to_be_there_is_fetched_at_once_alone_and_with_patience(
    reader: Reader, ringer: Ringer
) -> None:
    """A log so long that a short fetch comes back without its records, but with its end."""
    await reader.fetch(5, 7)  # of new partitions: at once, and all of them
    await reader.fetch(5, 7)
    await reader.fetch(7, 6)
    fetching = asyncio.ensure_future(reader.fetch(7, 7))
    assert await _waits(fetching)
    ringer.ring(_B, 7)
    await fetching
    assert reader.client.waits_ms == [3, 500, 500, 500]
    assert reader.client.asked == [[0, 1], [0], [1], [1]]


async def test_a_ring_for_what_has_been_fetched_is_no_reason_to_fetch(
    reader: Reader, ringer: Ringer
) -> None:
    await reader.fetch(7, 7)
    ringer.ring(_A, 6)
    fetching = asyncio.ensure_future(reader.fetch(7, 7))
    assert await _waits(fetching)
    fetching.cancel()


async def test_an_answer_that_was_under_way_does_not_hide_a_record_that_came_after_it(
    reader: Reader, ringer: Ringer
) -> None:
    await reader.fetch(7, 7)
    ringer.ring(_A, 7)
    reader.client.may_answer.clear()
    fetching = asyncio.ensure_future(reader.fetch(7, 7))
    assert await _waits(fetching)
    ringer.ring(_A, 8)
    assert await _waits(fetching)
    reader.client.may_answer.set()
    await fetching
    await reader.fetch(8, 7)
    assert reader.client.asked[1:] == [[0], [0]]


async def test_a_broker_that_has_forgotten_its_log_is_believed(reader: Reader) -> None:
    await reader.fetch(5, 7)
    reader.client.end = 0
    await reader.fetch(5, 7)
    fetching = asyncio.ensure_future(reader.fetch(5, 7))
    assert await _waits(fetching)
    fetching.cancel()


async def test_all_partitions_are_asked_for_now_and_then_whatever_was_rung_for(
    reader: Reader, ringer: Ringer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reader.fetch(7, 7)
    monkeypatch.setattr(doorbell, "UNRUNG_SECONDS", 0.0)
    await reader.fetch(7, 7)
    await reader.fetch(6, 7)
    assert reader.client.asked == [[0, 1], [0, 1], [0, 1]]
    assert reader.client.waits_ms == [3, 3, 500]
