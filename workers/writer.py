"""The one writer of a worker: entries of all replies, in one pipelined append after another.

Group commit: while an append is under way new entries gather, so that an engine step costs one round trip
however many replies it serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from contracts.entries import Entry, SealAfter
from contracts.stream_ids import StreamId
from contracts.token_stream import Appended, StreamsUnavailable, TokenStreams

log = logging.getLogger(__name__)

#: Entries of one pipeline.
_BATCH = 1_024
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0


class Sink(Protocol):
    """A reply that writes. The writer tells it what became of its entries, in their order."""

    request_id: str
    attempt: int

    @property
    def closed(self) -> bool:
        """Whether it has been refused: what it still has in the writer is dropped."""

    def appended(self, entry_id: StreamId) -> None:
        """The entry is in the stream."""

    def refused(self, result: Appended | None) -> None:
        """An entry was refused, for ever; None: the store could not be reached in time."""


_Item = tuple[Sink, StreamId, Entry | SealAfter]


class StreamWriter:
    """Writes entries in the order they are put, per reply; bounded by ``limit`` entries.

    An append whose answer was lost is settled by the stream's last id before it is repeated, so a
    connection that breaks is not taken for a fence.
    """

    def __init__(self, streams: TokenStreams, *, give_up_seconds: float, limit: int = 8_192) -> None:
        """A writer on ``streams``.

        Args:
            give_up_seconds: after so long without an answer from the store, the replies concerned are
                told (None), and are continued elsewhere once their leases have run out.
            limit: entries from which :attr:`full` asks the replies to wait.
        """
        self._streams = streams
        self._give_up = give_up_seconds
        self._limit = limit
        self._pending: list[_Item] = []
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

    def put(self, sink: Sink, entry_id: StreamId, entry: Entry | SealAfter) -> None:
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
            batch, self._pending = self._pending[:_BATCH], self._pending[_BATCH:]
            await self._flush([item for item in batch if not item[0].closed])
            if not self.full:
                self._room.set()

    async def _flush(self, batch: list[_Item]) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._give_up
        pause = _FIRST_PAUSE_SECONDS
        settle = False
        while batch:
            try:
                if settle:
                    batch = await self._settle(batch)
                    settle = False
                if batch:
                    results = await self._streams.append([(s.request_id, i, e) for s, i, e in batch])
                    batch = self._report(batch, results)
                    settle = bool(batch)
            except StreamsUnavailable as error:
                if loop.time() >= deadline:
                    log.error(
                        "token streams unreachable, giving replies up", extra={"entries": len(batch)}
                    )
                    for sink, _, _ in batch:
                        sink.refused(None)
                    return
                log.warning("token streams unreachable", extra={"error": str(error)[:200]})
                settle = True
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    @staticmethod
    def _report(batch: list[_Item], results: Sequence[Appended]) -> list[_Item]:
        """Tell the sinks; returns the entries refused as fenced, which may have been written before."""
        doubtful = []
        for item, result in zip(batch, results, strict=True):
            sink, entry_id, _ = item
            if result is Appended.OK:
                sink.appended(entry_id)
            elif result is Appended.FENCED:
                doubtful.append(item)
            elif not sink.closed:
                sink.refused(result)
        return doubtful

    async def _settle(self, batch: list[_Item]) -> list[_Item]:
        """Find out which entries are in their streams; returns those that are still to be written."""
        ids = list(dict.fromkeys(sink.request_id for sink, _, _ in batch))
        last = dict(zip(ids, await self._streams.last_ids(ids), strict=True))
        left = []
        for item in batch:
            sink, entry_id, entry = item
            if sink.closed:
                continue
            verdict = settled(last[sink.request_id], entry_id, entry)
            if verdict is None:
                left.append(item)
            elif verdict is Appended.OK:
                sink.appended(entry_id)
            else:
                sink.refused(verdict)
        return left


def settled(last: StreamId | None, entry_id: StreamId, entry: Entry | SealAfter) -> Appended | None:
    """What became of an append, by its stream's last id; None: it was not applied.

    Entries of an attempt come only from the worker whose start of it was accepted, so a last id of the
    same attempt says that ours is in. Of a start itself it does not: two workers may try the same.
    """
    if last is None:
        return Appended.GONE
    if last.is_seal:
        return Appended.SEALED
    if isinstance(entry, SealAfter):
        return None if last == entry.after else Appended.FENCED
    if entry_id > last:
        return None
    if last.attempt == entry_id.attempt and not entry_id.is_attempt_start:
        return Appended.OK
    return Appended.FENCED
