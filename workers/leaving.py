"""Ending replies that run here and that all readers have left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from contracts.absence import AbsenceTracker, Sighting
from contracts.entries import Terminal
from contracts.tiers import Status
from contracts.token_stream import Appended, StreamsUnavailable
from infra.telemetry import LEFT_REQUESTS

log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 0.5
_CANCELLED = Terminal(status=Status.CANCELLED)


class Presence(Protocol):
    """Where readers are known. Raises :class:`contracts.token_stream.StreamsUnavailable`."""

    async def look(self, request_ids: Sequence[str]) -> tuple[int, list[Sighting]]:
        """Now (Unix milliseconds), and what is known of each request's readers."""


class Sealer(Protocol):
    """Where requests are ended. Raises :class:`contracts.token_stream.StreamsUnavailable`."""

    async def seal_many(self, seals: Sequence[tuple[str, Terminal]]) -> list[Appended]:
        """Write terminal entries."""


class Watched(Protocol):
    """A reply that runs here.

    Attributes:
        accepted_ms: acceptance, Unix milliseconds.
        leave_grace_ms: how long it goes on without a reader; None = to its end.
    """

    request_id: str
    accepted_ms: int
    leave_grace_ms: int | None

    def refused(self, result: Appended | None) -> None:
        """End it: it was sealed."""


class LeaveWatch:
    """Looks twice a second, in one round trip, who reads the replies; seals those that are due."""

    def __init__(self, presence: Presence, streams: Sealer) -> None:
        self._presence = presence
        self._streams = streams
        self._tracker = AbsenceTracker()
        self._replies: dict[str, Watched] = {}

    def add(self, reply: Watched) -> None:
        """Watch a reply that has started."""
        if reply.leave_grace_ms is not None:
            self._replies[reply.request_id] = reply

    def remove(self, reply: Watched) -> None:
        """The reply has ended here. Idempotent."""
        if self._replies.get(reply.request_id) is reply:
            del self._replies[reply.request_id]
            self._tracker.forget(reply.request_id)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            if not self._replies:
                continue
            try:
                await self._look()
            except StreamsUnavailable as error:
                log.warning("readers not looked for", extra={"error": str(error)[:200]})

    async def _look(self) -> None:
        replies = list(self._replies.values())
        now_ms, sightings = await self._presence.look([r.request_id for r in replies])
        due = [
            reply
            for reply, sighting in zip(replies, sightings, strict=True)
            if self._replies.get(reply.request_id) is reply
            and reply.leave_grace_ms is not None
            and self._tracker.observe(
                reply.request_id,
                sighting,
                accepted_ms=reply.accepted_ms,
                grace_ms=reply.leave_grace_ms,
                now_ms=now_ms,
            )
        ]
        if not due:
            return
        results = await self._streams.seal_many([(r.request_id, _CANCELLED) for r in due])
        for reply, result in zip(due, results, strict=True):
            # Any other answer reaches the reply by its own writes, or by the lease keeper.
            if result is Appended.OK:
                LEFT_REQUESTS.labels("worker").inc()
                log.info("all readers left", extra={"request_id": reply.request_id})
                reply.refused(Appended.SEALED)
