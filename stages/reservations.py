"""Settles what requests have reserved of their limits.

By their outcomes, within moments of the end. What is left then (the gateway died before it made the stream,
the limits' Redis was away when the outcome came) is found by looking at the token streams. Both ways are
idempotent and book the same figure, so any number of processes may go either at any time.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from contracts.records import OutcomeRecord
from contracts.reply import Reply
from contracts.token_stream import StreamsUnavailable
from infra.limits_redis import LimitCounters
from infra.stream_redis import RedisTokenStreams

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 5.0
#: A stream is made within seconds of the reservation, so one that is not there after so long never will be.
CREATING_MS: Final = 30_000
#: Requests looked at in one turn.
BATCH: Final = 256


class Reservations:
    """Everybody's reservations in the limits' counters."""

    def __init__(self, counters: LimitCounters, streams: RedisTokenStreams) -> None:
        self._counters = counters
        self._streams = streams

    async def settle(self, outcome: OutcomeRecord) -> None:
        """Book what a request has used; what cannot be booked now, :meth:`run` makes up for."""
        try:
            await self._counters.settle(outcome.request_id, outcome.usage.total_tokens)
        except StreamsUnavailable as error:
            log.warning(
                "limits not settled yet",
                extra={"request_id": outcome.request_id, "error": str(error)[:200]},
            )

    async def run(self) -> None:
        """Look at those that are left, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look(CREATING_MS)
            except StreamsUnavailable as error:
                log.warning("reservations not looked at", extra={"error": str(error)[:200]})

    async def look(self, age_ms: int) -> None:
        """Settle those whose streams have ended, and undo those that have none.

        Args:
            age_ms: younger ones are left alone, as are those that were looked at since.
        """
        request_ids = await self._counters.unsettled(age_ms, BATCH)
        if not request_ids:
            return
        last_ids = await self._streams.last_ids(request_ids)
        still_open, lapsed = [], []
        for request_id, last in zip(request_ids, last_ids, strict=True):
            if last is not None and not last.is_seal:
                still_open.append(request_id)
            elif not await self._end(request_id, made=last is not None):
                lapsed.append(request_id)
        await self._counters.looked_at(still_open)
        await self._counters.forget(lapsed)

    async def _end(self, request_id: str, *, made: bool) -> bool:
        if not made:
            return await self._counters.undo(request_id)
        reply = Reply().extend(await self._streams.read_all(request_id))
        return await self._counters.settle(request_id, reply.usage.total_tokens)
