"""Reading one reply with an end to it: no reader waits for a request that nothing will ever run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from contracts.entries import Accepted, StreamEntry, Terminal
from contracts.errors import ApiError, ErrorCode, error_body
from contracts.stream_ids import StreamId
from contracts.tiers import Status
from streaming_edge.protocols import EntrySource, StreamHub

from .protocols import Seals
from .request_times import ReplyFacts, unix_ms

_SHORTEST_WAIT_SECONDS = 0.05


class ReplyReader:
    """An :class:`streaming_edge.protocols.EntrySource` that watches the request's deadlines.

    Attributes:
        facts: of the request, as far as they are known.
        ended: the terminal entry has been returned.
        terminal: the terminal entry, once it was read.
    """

    def __init__(
        self,
        source: EntrySource,
        streams: Seals,
        facts: ReplyFacts,
        *,
        started: bool,
        now_ms: Callable[[], int] = unix_ms,
    ) -> None:
        self._source = source
        self._streams = streams
        self.facts = facts
        self._started = started
        self._now_ms = now_ms
        self.ended = source.ended
        self.terminal: Terminal | None = None

    async def next(self, timeout_seconds: float) -> list[StreamEntry]:
        """The next entries; empty after a timeout.

        A request that has not started in time is ended as expired, whoever should have done so; its
        terminal entry then comes as any other.

        Raises:
            ApiError: ``deadline_exceeded`` when the reply takes longer than any may; what the source raises.
        """
        until_ms = self.facts.end_by_ms if self._started else self.facts.start_by_ms
        left = max(_SHORTEST_WAIT_SECONDS, (until_ms - self._now_ms()) / 1000)
        entries = await self._source.next(min(timeout_seconds, left))
        self.ended = self._source.ended
        if entries:
            first, last = entries[0], entries[-1]
            if isinstance(first.entry, Accepted):
                self.facts = self.facts.as_accepted(first.entry)
            self._started = self._started or last.id.attempt > 0
            if isinstance(last.entry, Terminal):
                self.terminal = last.entry
            return entries
        now_ms = self._now_ms()
        if now_ms >= self.facts.end_by_ms:
            raise ApiError(ErrorCode.DEADLINE_EXCEEDED, "The reply took longer than any reply may.")
        if not self._started and now_ms >= self.facts.start_by_ms:
            error = error_body(ErrorCode.DEADLINE_EXCEEDED, "The request was not started in time.")
            expired = Terminal(status=Status.EXPIRED, error=error)
            await self._streams.seal(self.facts.request_id, expired)
            self._started = True
        return []


@asynccontextmanager
async def read_reply(
    hub: StreamHub, streams: Seals, facts: ReplyFacts, after: StreamId
) -> AsyncIterator[ReplyReader]:
    """Read a reply after an offset that was checked."""
    async with hub.subscribe(facts.request_id, after) as subscription:
        yield ReplyReader(subscription, streams, facts, started=after.attempt > 0)
