"""Rings reach who listens, are kept while they cannot be answered, and never disturb who rings."""

import asyncio
import os
from collections.abc import Iterator
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
    """A doorbell that has answered what a new one takes for rung."""
    doorbell = Doorbell(folder)
    doorbell.listen(set(partitions))
    await doorbell.wait(set(partitions))
    return doorbell


async def _rang(doorbell: Doorbell, *partitions: Partition, within: float = 10.0) -> bool:
    """Whether a wait that begins now ends within so many seconds."""
    waiting = asyncio.ensure_future(doorbell.wait(set(partitions)))
    await asyncio.wait({waiting}, timeout=within)
    ended = waiting.done()
    waiting.cancel()
    return ended


async def test_a_ring_wakes_all_who_listen_and_only_once(folder: Path, ringer: Ringer) -> None:
    bells = [await _listening(folder, _A), await _listening(folder, _A)]
    ringer.ring(_A)
    assert [await _rang(bell, _A) for bell in bells] == [True, True]
    assert not await _rang(bells[0], _A, within=_SHORT)
    for bell in bells:
        bell.close()


async def test_a_ring_for_another_partition_is_not_heard(folder: Path, ringer: Ringer) -> None:
    bell = await _listening(folder, _A)
    ringer.ring(_B)
    assert not await _rang(bell, _A, within=_SHORT)
    bell.close()


async def test_a_ring_that_a_fetch_left_out_is_kept_for_the_next(folder: Path, ringer: Ringer) -> None:
    bell = await _listening(folder, _A, _B)
    ringer.ring(_A)
    assert await _rang(bell, _B)
    assert await _rang(bell, _A, _B)
    assert not await _rang(bell, _A, _B, within=_SHORT)
    bell.close()


async def test_a_ring_for_a_partition_that_was_taken_away_is_forgotten(
    folder: Path, ringer: Ringer
) -> None:
    bell = await _listening(folder, _A, _B)
    ringer.ring(_A)
    assert await _rang(bell, _B)
    bell.listen({_B})
    assert not await _rang(bell, _B, within=_SHORT)
    bell.close()


async def test_a_new_partition_is_fetched_at_once(folder: Path) -> None:
    bell = await _listening(folder, _A)
    bell.listen({_A, _B})
    assert await _rang(bell, _A, _B)
    bell.close()


async def test_ringing_where_nobody_listens_or_somebody_died_is_harmless(
    folder: Path, ringer: Ringer
) -> None:
    ringer.ring(_A)
    bell = await _listening(folder, _A)
    (path,) = _sockets(folder)
    bell.close()
    assert not _sockets(folder)
    os.mknod(path)  # what a killed process leaves: a name that nobody answers
    ringer.ring(_A)
    assert not path.exists()


async def test_a_ringer_does_not_wait_for_one_who_does_not_listen_any_more(
    folder: Path, ringer: Ringer
) -> None:
    """A frozen consumer's socket fills up."""
    bell = await _listening(folder, _A)
    for _ in range(10_000):
        ringer.ring(_A)
    assert await _rang(bell, _A)
    bell.close()


class Client:
    """A Kafka client whose broker's log of each partition ends at ``end``."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.waits_ms: list[int] = []
        self.asked: list[list[int]] = []

    async def send(self, _node: object, request: Any) -> Any:
        self.waits_ms.append(request._max_wait_ms)
        [(topic, those)] = request.topics
        self.asked.append([partition for partition, *_ in those])
        return SimpleNamespace(topics=[(topic, [(n, 0, self.end, -1, None, b"") for n, *_ in those])])

    async def close(self) -> None: ...


async def _fetch(consumer: Any, *offsets: int) -> None:
    """A fetch from these offsets of partitions 0, 1, …"""
    wanted = [(partition, offset, 1 << 20) for partition, offset in enumerate(offsets)]
    request = FetchRequest(3, 1, 1 << 20, 0, [("requests", wanted)])
    await asyncio.wait_for(consumer._client.send(0, request), 10)


async def test_what_is_known_to_be_there_is_fetched_at_once_and_with_patience(folder: Path) -> None:
    """A log so long that a short fetch comes back without its records, but with its end."""
    client = Client(end=7)
    consumer: Any = SimpleNamespace(_client=client, assignment=lambda: {_A})
    fetch_when_rung(consumer, folder)
    await _fetch(consumer, 5)  # of a new partition: at once
    await _fetch(consumer, 5)
    await _fetch(consumer, 6)
    waiting = asyncio.ensure_future(_fetch(consumer, 7))
    await asyncio.wait({waiting}, timeout=_SHORT)
    assert not waiting.done()
    assert client.waits_ms == [3, 500, 500]
    ringer = Ringer(folder)
    ringer.ring(_A)
    await waiting
    assert client.waits_ms == [3, 500, 500, 3]
    ringer.close()
    await consumer._client.close()


async def test_only_partitions_that_may_have_something_are_fetched(
    folder: Path, ringer: Ringer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(end=7)
    consumer: Any = SimpleNamespace(_client=client, assignment=lambda: {_A, _B})
    fetch_when_rung(consumer, folder)
    await _fetch(consumer, 7, 7)
    ringer.ring(_B)
    await _fetch(consumer, 7, 7)
    await _fetch(consumer, 6, 7)
    waiting = asyncio.ensure_future(_fetch(consumer, 7, 7))
    await asyncio.wait({waiting}, timeout=_SHORT)
    ringer.ring(_B)
    await waiting
    assert client.asked == [[0, 1], [1], [0], [1]]
    monkeypatch.setattr(doorbell, "UNRUNG_SECONDS", 0.0)
    await _fetch(consumer, 7, 7)
    assert client.asked[-1] == [0, 1]
    await consumer._client.close()
