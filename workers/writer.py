"""The one writer of a worker: entries of all replies, in one pipelined append after another.

Group commit: while an append is under way new entries gather, so that an engine step costs one round trip
however many replies it serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from contracts.entries import Appendable, SealAfter, StartAfter, Terminal
from contracts.errors import ErrorCode, error_body
from contracts.stream_ids import SEAL, StreamId
from contracts.tiers import Status
from contracts.token_stream import Appended, StreamsFull, StreamsUnavailable, TokenStreams

from .trail import Standing, Trail, before_start, landed, same_start, standing

log = logging.getLogger(__name__)

#: Entries of one pipeline.
_BATCH = 1_024
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0

_FULL = Terminal(
    status=Status.FAILED,
    error=error_body(ErrorCode.REQUEST_LOST, "The store of token streams has no memory left."),
)
_HOLE = Terminal(
    status=Status.FAILED,
    error=error_body(ErrorCode.STREAM_LOST, "A part of the reply's token stream was lost."),
)


class Sink(Protocol):
    """A reply that writes. The writer tells it what became of its entries, in their order.

    Attributes:
        trail: what it has written; kept by the writer.
    """

    request_id: str
    attempt: int
    trail: Trail

    @property
    def closed(self) -> bool:
        """Whether it has been refused: what it still has in the writer is dropped."""

    def appended(self, entry_id: StreamId) -> None:
        """The entry is in the stream. Told again of text that was lost and written again."""

    def refused(self, result: Appended | None) -> None:
        """An entry was refused, for ever; None: the store could not be reached in time."""


_Item = tuple[Sink, StreamId, Appendable]


class StreamWriter:
    """Writes entries in the order they are put, per reply; bounded by ``limit`` entries.

    After every failed append each reply is compared with its stream before more of it is written: what was
    applied is not taken for a fence, what the store has lost meanwhile is written again where it is still
    known here, and otherwise the attempt ends as fenced, so that another goes on from what is there.
    """

    def __init__(self, streams: TokenStreams, *, give_up_seconds: float, limit: int = 8_192) -> None:
        """A writer on ``streams``.

        Args:
            streams: must fail once after each loss of its connection, instead of connecting again in
                silence (``connect(..., steady=True)``): a store can lose entries only then.
            give_up_seconds: after so long without an answer from the store, the replies concerned are
                told (None), and are continued elsewhere once their leases have run out. Where it answers
                that its memory is full, they are ended as failed.
            limit: entries from which :attr:`full` asks the replies to wait.
        """
        self._streams = streams
        self._give_up = give_up_seconds
        self._limit = limit
        self._pending: list[_Item] = []
        self._interruptions = 0
        self._failing_since: float | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._room.set()

    @property
    def full(self) -> bool:
        """Whether replies must wait for :meth:`room` before they put more."""
        return len(self._pending) >= self._limit

    async def room(self) -> None:
        """Wait until the writer is no longer full."""
        while self.full:
            self._room.clear()
            await self._room.wait()

    def put(self, sink: Sink, entry_id: StreamId, entry: Appendable) -> None:
        """Queue an entry; never blocks. The sink hears of it through its two methods."""
        self._pending.append((sink, entry_id, entry))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def run(self) -> None:
        """Write until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._pending:
                self._waiter = loop.create_future()
                await self._waiter
            batch, held = _confirmed_first(self._pending[:_BATCH])
            self._pending = held + self._pending[_BATCH:]
            await self._flush([item for item in batch if not item[0].closed])
            if not self.full:
                self._room.set()

    async def _flush(self, batch: list[_Item]) -> None:
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE_SECONDS
        doubt = any(self._in_doubt(sink) for sink, _, _ in batch)
        while batch:
            try:
                if doubt:
                    batch = await self._compare(batch)
                    if not batch:
                        return
                results = await self._streams.append([(s.request_id, i, e) for s, i, e in batch])
                self._failing_since = None
                batch = self._report(batch, results)
                doubt = bool(batch)
            except StreamsUnavailable as error:
                self._interruptions += 1
                doubt = True
                now = loop.time()
                if self._failing_since is None:
                    self._failing_since = now
                if now - self._failing_since >= self._give_up:
                    await self._give_up_on(batch, error)
                    return
                log.warning("token streams unreachable", extra={"error": str(error)[:200]})
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    def _in_doubt(self, sink: Sink) -> bool:
        return sink.trail.seen != self._interruptions and sink.trail.last is not None

    def _report(self, batch: list[_Item], results: Sequence[Appended]) -> list[_Item]:
        """Tell the sinks; returns the entries refused as fenced, which may have been written before."""
        doubtful = []
        for item, result in zip(batch, results, strict=True):
            if result is Appended.OK:
                self._wrote(item)
            elif result is Appended.FENCED:
                doubtful.append(item)
            elif not item[0].closed:
                item[0].refused(result)
        return doubtful

    def _wrote(self, item: _Item) -> None:
        sink, entry_id, entry = item
        sink.trail.wrote(entry_id, entry, self._interruptions)
        sink.appended(entry_id)

    async def _compare(self, batch: list[_Item]) -> list[_Item]:
        """Find out what the store has of each reply; returns what is to be written, in order."""
        groups: dict[Sink, list[_Item]] = {}
        for item in batch:
            if not item[0].closed:
                groups.setdefault(item[0], []).append(item)
        last = await self._streams.last_ids([sink.request_id for sink in groups])
        left = []
        for (sink, items), last_id in zip(groups.items(), last, strict=True):
            found = standing(last_id, sink.trail, sink.attempt)
            if isinstance(found, Appended):
                sink.refused(found)
            elif last_id is not None:
                left += await self._go_on(sink, items, found, last_id)
        return left

    async def _go_on(
        self, sink: Sink, items: list[_Item], found: Standing, last: StreamId
    ) -> list[_Item]:
        trail = sink.trail
        if found is Standing.AHEAD:
            after = before_start(sink.attempt) if trail.last is None else trail.last
            entries = await self._streams.read(sink.request_id, after, len(items) + 1)
            count = landed([(entry_id, entry) for _, entry_id, entry in items], entries)
            if count is None:
                await self._broken(sink, last)
                return []
            for item in items[:count]:
                self._wrote(item)
            return items[count:]
        if found is Standing.BEHIND:
            entries = await self._streams.read(sink.request_id, before_start(sink.attempt), 1)
            missing = None
            if same_start(trail, sink.attempt, entries):
                missing = trail.lost_behind(last)
            if missing is None:
                log.error("the store has lost a part of a reply", extra={"request_id": sink.request_id})
                sink.refused(Appended.FENCED)
                return []
            log.warning(
                "writing again what the store has lost",
                extra={"request_id": sink.request_id, "entries": len(missing)},
            )
            items = [*((sink, entry_id, text) for entry_id, text in missing), *items]
        start = items[0][2]
        if trail.last is None and isinstance(start, StartAfter) and start.after != last:
            sink.refused(Appended.FENCED)
            return []
        trail.seen = self._interruptions
        return items

    async def _broken(self, sink: Sink, last: StreamId) -> None:
        """The stream holds what this attempt did not write in this order: another's, or with a hole."""
        if sink.trail.last is None:
            sink.refused(Appended.FENCED)  # another worker has made the same start
            return
        log.error("a reply's stream has a hole", extra={"request_id": sink.request_id})
        await self._end(sink, _HOLE, last)

    async def _end(self, sink: Sink, terminal: Terminal, last: StreamId) -> None:
        writes = [(sink.request_id, SEAL, SealAfter(terminal, last))]
        (result,) = await self._streams.append(writes)
        # As if somebody else had ended it: whoever runs it reads how.
        sink.refused(Appended.SEALED if result is Appended.OK else result)

    async def _give_up_on(self, batch: list[_Item], error: StreamsUnavailable) -> None:
        log.error(
            "token streams unusable, giving replies up",
            extra={"entries": len(batch), "error": str(error)[:200]},
        )
        for sink in dict.fromkeys(sink for sink, _, _ in batch):
            last = sink.trail.last
            if isinstance(error, StreamsFull) and last is not None and not sink.closed:
                try:
                    await self._end(sink, _FULL, last)
                except StreamsUnavailable as failure:
                    error = failure
            if not sink.closed:
                sink.refused(None)


def _confirmed_first(batch: list[_Item]) -> tuple[list[_Item], list[_Item]]:
    """What may go out together, and what has to wait: text whose start is not accepted yet.

    The text's id is larger than whatever refuses the start, so nothing else would keep it out.
    """
    starting = {sink for sink, entry_id, _ in batch if entry_id.token == 0}
    if not starting:
        return batch, []
    now: list[_Item] = []
    held: list[_Item] = []
    for item in batch:
        (held if item[0] in starting and item[1].token else now).append(item)
    return now, held
