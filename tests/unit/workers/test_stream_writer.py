"""The writer: one pipeline for all, answers to each, and no fence seen where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from contracts.entries import (
    Accepted,
    Appendable,
    Dispatched,
    SealAfter,
    StartAfter,
    Started,
    StreamEntry,
    Terminal,
    Text,
)
from contracts.errors import ErrorCode
from contracts.reply import Reply
from contracts.stream_ids import DISPATCHED, SEAL, StreamId
from contracts.tiers import Status
from contracts.token_stream import Appended, StreamsFull, StreamsUnavailable
from workers.leases import fate
from workers.trail import KEPT, Trail
from workers.writer import StreamWriter

DONE = Terminal(status=Status.COMPLETED)


class Streams:
    """Streams by the rule of Redis; answers can be lost before or after appends are applied."""

    def __init__(self, *ids: str) -> None:
        self.items: dict[str, list[StreamEntry]] = {
            i: [StreamEntry(DISPATCHED, Dispatched(worker_id="w"))] for i in ids
        }
        self.calls: list[list[StreamId]] = []
        self.lose_before = 0
        self.lose_after = 0
        self.full = False
        self.refuse_once: set[StreamId] = set()
        self.gate = asyncio.Event()
        self.gate.set()

    async def append(self, writes: Sequence[tuple[str, StreamId, Appendable]]) -> list[Appended]:
        await self.gate.wait()
        if self.lose_before:
            self.lose_before -= 1
            raise StreamsUnavailable("before")
        self.calls.append([entry_id for _, entry_id, _ in writes])
        results = [self._append(*write) for write in writes]
        if self.lose_after:
            self.lose_after -= 1
            raise StreamsUnavailable("after")
        if None in results:
            raise StreamsFull("full")
        return [r for r in results if r is not None]

    def _append(self, rid: str, entry_id: StreamId, entry: Appendable) -> Appended | None:
        items = self.items.get(rid)
        if items is None:
            return Appended.GONE
        if items[-1].id == SEAL:
            return Appended.SEALED
        if isinstance(entry, SealAfter):
            if items[-1].id != entry.after:
                return Appended.FENCED
            entry = entry.terminal
        elif isinstance(entry, StartAfter):
            if items[-1].id != entry.after:
                return Appended.FENCED
            entry = entry.started
        elif self.full or entry_id in self.refuse_once:
            self.refuse_once.discard(entry_id)
            return None
        if entry_id <= items[-1].id:
            return Appended.FENCED
        items.append(StreamEntry(entry_id, entry))
        return Appended.OK

    def lose_tail(self, rid: str, last: StreamId) -> None:
        """What comes after ``last`` is gone, and so is the connection."""
        self.items[rid] = [item for item in self.items[rid] if item.id <= last]
        self.lose_before = 1

    def ids(self, rid: str) -> list[str]:
        return [str(item.id) for item in self.items[rid][1:]]

    async def last_ids(self, request_ids: Sequence[str]) -> list[StreamId | None]:
        return [self.items[r][-1].id if r in self.items else None for r in request_ids]

    async def create(self, request_id: str, accepted: Accepted) -> None:
        raise NotImplementedError

    async def seal(self, request_id: str, terminal: Terminal) -> Appended:
        raise NotImplementedError

    async def read(self, request_id: str, after: StreamId, limit: int) -> list[StreamEntry]:
        return [item for item in self.items[request_id] if item.id > after][:limit]


class Sink:
    def __init__(self, request_id: str, attempt: int = 1) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.trail = Trail()
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


def began(worker_id: str = "me") -> Started:
    return Started(worker_id=worker_id, model_revision="1", tokens_out=0)


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
    streams._append("a", StreamId(2, 0), began("other"))
    async with running(streams) as writer:
        writer.put(old, *text(1))
        writer.put(old, *text(2))
        writer.put(other, *text(1))
        await until(lambda: bool(old.answers) and bool(other.answers))
        writer.put(old, *text(3))
        writer.put(other, *text(2))
        await until(lambda: len(other.answers) == 2)
    assert old.answers == [Appended.FENCED]
    assert streams.ids("a") == ["2-0"]


async def test_a_sealed_and_a_lost_stream_are_told_apart() -> None:
    streams, sealed, gone = Streams("a"), Sink("a"), Sink("nothere")
    streams._append("a", SEAL, DONE)
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


def test_the_last_id_says_what_became_of_an_attempt() -> None:
    assert fate(StreamId(1, 9), 1) is Appended.OK
    assert fate(StreamId(2, 0), 1) is Appended.FENCED
    assert fate(SEAL, 1) is Appended.SEALED
    assert fate(None, 1) is Appended.GONE


def seal(after: int) -> tuple[StreamId, SealAfter]:
    return SEAL, SealAfter(DONE, StreamId(1, after))


async def started(writer: StreamWriter, streams: Streams, sink: Sink, texts: int = 0) -> None:
    writer.put(sink, StreamId(1, 0), began())
    for n in range(1, texts + 1):
        writer.put(sink, *text(n))
    await until(lambda: len(sink.answers) == texts + 1)


def reply(streams: Streams, rid: str) -> Reply:
    return Reply().extend(streams.items[rid])


async def test_a_lost_end_of_a_stream_is_written_again_before_anything_new_e10() -> None:
    streams, sink = Streams("a"), Sink("a")
    async with running(streams) as writer:
        await started(writer, streams, sink, texts=5)
        streams.lose_tail("a", StreamId(1, 2))
        writer.put(sink, *text(6))
        writer.put(sink, *seal(6))
        await until(lambda: SEAL in sink.answers)
    assert streams.ids("a") == ["1-0", *(f"1-{n}" for n in range(1, 7)), str(SEAL)]
    assert reply(streams, "a").gap is None


async def test_the_loss_is_seen_by_every_reply_not_only_by_the_one_whose_append_failed() -> None:
    streams, first, second = Streams("a", "b"), Sink("a"), Sink("b")
    async with running(streams) as writer:
        await started(writer, streams, first, texts=3)
        await started(writer, streams, second, texts=3)
        streams.lose_tail("a", StreamId(1, 1))
        streams.lose_tail("b", StreamId(1, 1))
        writer.put(first, *text(4))
        await until(lambda: StreamId(1, 4) in first.answers)
        writer.put(second, *text(4))
        await until(lambda: StreamId(1, 4) in second.answers)
    for rid in ("a", "b"):
        assert streams.ids(rid) == [f"1-{n}" for n in range(5)]


async def test_more_loss_than_is_remembered_leaves_the_reply_to_another_attempt() -> None:
    streams, sink = Streams("a"), Sink("a")
    async with running(streams, limit=2 * KEPT) as writer:
        await started(writer, streams, sink, texts=KEPT + 5)
        streams.lose_tail("a", StreamId(1, 2))
        writer.put(sink, *text(KEPT + 6))
        await until(lambda: sink.closed)
    assert sink.answers[-1] is Appended.FENCED
    assert streams.ids("a") == ["1-0", "1-1", "1-2"]


async def test_an_attempt_that_lost_its_start_has_lost_its_claim() -> None:
    streams, sink = Streams("a"), Sink("a")
    async with running(streams) as writer:
        await started(writer, streams, sink, texts=2)
        streams.lose_tail("a", DISPATCHED)
        streams._append("a", StreamId(1, 0), began("another"))
        writer.put(sink, *text(3))
        await until(lambda: sink.closed)
    assert sink.answers[-1] is Appended.FENCED
    assert streams.ids("a") == ["1-0"]


async def test_a_start_whose_answer_was_lost_is_told_from_anothers() -> None:
    for worker_id, answer in (("me", StreamId(1, 0)), ("another", Appended.FENCED)):
        streams, sink = Streams("a"), Sink("a")
        streams.lose_before = 1
        streams._append("a", StreamId(1, 0), began(worker_id))
        async with running(streams) as writer:
            writer.put(sink, StreamId(1, 0), began())
            await until(lambda sink=sink: bool(sink.answers))
        assert sink.answers == [answer]


async def test_text_and_seal_of_a_failed_append_are_both_written_again() -> None:
    streams, sink = Streams("a"), Sink("a")
    async with running(streams) as writer:
        await started(writer, streams, sink, texts=1)
        streams.lose_before = 1
        writer.put(sink, *text(2))
        writer.put(sink, *seal(2))
        await until(lambda: len(sink.answers) == 4)
    assert sink.answers[-2:] == [StreamId(1, 2), SEAL]


async def test_a_full_store_is_waited_for_h8() -> None:
    streams, sink = Streams("a"), Sink("a")
    async with running(streams) as writer:
        await started(writer, streams, sink, texts=1)
        streams.full = True
        writer.put(sink, *text(2))
        await until(lambda: len(streams.calls) > 3)
        streams.full = False
        await until(lambda: StreamId(1, 2) in sink.answers)


async def test_a_store_that_stays_full_ends_the_reply_with_a_clear_error_h8() -> None:
    streams, sink = Streams("a"), Sink("a")
    async with running(streams, give_up=0.0) as writer:
        await started(writer, streams, sink, texts=1)
        streams.full = True
        writer.put(sink, *text(2))
        await until(lambda: sink.closed)
    assert sink.answers[-1] is Appended.SEALED
    found = reply(streams, "a").terminal
    assert found is not None
    assert found.error is not None
    assert found.error.code == ErrorCode.REQUEST_LOST


async def test_a_hole_that_a_half_applied_append_made_ends_the_reply_h8() -> None:
    """Memory that is freed in the middle of a pipeline: an entry is refused, the next one is taken."""
    streams, sink = Streams("a"), Sink("a")
    async with running(streams) as writer:
        await started(writer, streams, sink, texts=1)
        streams.refuse_once = {StreamId(1, 2)}
        streams.gate.clear()
        writer.put(sink, *text(2))
        writer.put(sink, *text(3))
        streams.gate.set()
        await until(lambda: sink.closed)
    assert streams.ids("a") == ["1-0", "1-1", "1-3", str(SEAL)]
    found = reply(streams, "a")
    assert found.gap == StreamId(1, 3)
    assert found.terminal is not None
    assert found.terminal.error is not None
    assert found.terminal.error.code == ErrorCode.STREAM_LOST


async def test_i8_a_takeover_that_comes_too_early_is_refused_and_its_text_stays_out() -> None:
    """Its text would have a larger id than whatever refuses its start."""
    streams, sink = Streams("a"), Sink("a", attempt=2)
    streams._append("a", StreamId(1, 0), began("other"))
    streams._append("a", *text(1))
    async with running(streams) as writer:
        writer.put(sink, StreamId(2, 0), StartAfter(began(), StreamId(1, 0)))
        writer.put(sink, *text(1, attempt=2))
        await until(lambda: sink.closed)
    assert sink.answers == [Appended.FENCED]
    assert streams.ids("a") == ["1-0", "1-1"]
