"""Keeping the leases of replies that make progress, and noticing what became of those that write nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from contracts.stream_ids import StreamId
from contracts.token_stream import Appended, StreamsUnavailable

log = logging.getLogger(__name__)


class LeaseStore(Protocol):
    """Where leases live. All raise :class:`contracts.token_stream.StreamsUnavailable`."""

    async def renew_leases(self, request_ids: Sequence[str], worker_id: str) -> None:
        """Set or prolong this worker's leases."""

    async def give_up_leases(self, request_ids: Sequence[str], worker_id: str) -> None:
        """End this worker's leases; others' are left alone."""

    async def last_ids(self, request_ids: Sequence[str]) -> list[StreamId | None]:
        """Id of each stream's last entry; None where there is no stream."""


class Leased(Protocol):
    """A reply that runs here."""

    request_id: str
    attempt: int

    def hung(self, now: float) -> bool:
        """Whether it has made no progress for too long (``now``: monotonic seconds)."""

    def wrote_since(self, then: float) -> bool:
        """Whether an entry of it was written after ``then`` (monotonic seconds)."""

    def refused(self, result: Appended | None) -> None:
        """End it: it was taken over, sealed or lost."""


def fate(last: StreamId | None, attempt: int) -> Appended:
    """What has become of attempt ``attempt``, by its stream's last id; OK while it is the latest."""
    if last is None:
        return Appended.GONE
    if last.is_seal:
        return Appended.SEALED
    return Appended.FENCED if last.attempt > attempt else Appended.OK


class LeaseKeeper:
    """Renews leases every quarter of their life.

    A reply that hangs is not renewed: its lease runs out, another worker takes over, and this one learns
    of it here, as it writes nothing that could be refused.
    """

    def __init__(self, store: LeaseStore, worker_id: str, lease_ms: int) -> None:
        self._store = store
        self._worker_id = worker_id
        self._interval = lease_ms / 4000
        self._replies: dict[str, Leased] = {}
        self._fresh: list[str] = []
        self._wake = asyncio.Event()
        self._storing = asyncio.Lock()

    def add(self, reply: Leased) -> None:
        """Take the lease of a reply that has started, at once."""
        self._replies[reply.request_id] = reply
        self._fresh.append(reply.request_id)
        self._wake.set()

    def remove(self, reply: Leased) -> None:
        """Keep this lease no longer; it runs out by itself (or went with the seal)."""
        self._replies.pop(reply.request_id, None)

    async def give_up(self, request_id: str) -> None:
        """End the lease of a reply that was removed, so that nobody waits for it to run out.

        Raises:
            StreamsUnavailable: it may still be alive.
        """
        # Not beside a renewal, which could reach the store after it.
        async with self._storing:
            await self._store.give_up_leases([request_id], self._worker_id)

    async def run(self) -> None:
        """Renew until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            now = loop.time()
            self._wake.clear()
            try:
                async with self._storing:
                    fresh = [rid for rid in self._fresh if rid in self._replies]
                    self._fresh = []
                    if now >= due:
                        due = now + self._interval
                        await self._renew(now)
                    elif fresh:
                        await self._store.renew_leases(fresh, self._worker_id)
            except StreamsUnavailable as error:
                log.warning("leases not renewed", extra={"error": str(error)[:200]})
            try:
                # Not wait_for(): up to Python 3.11 it can swallow a cancellation that meets its result.
                async with asyncio.timeout(max(0.0, due - loop.time())):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _renew(self, now: float) -> None:
        replies = list(self._replies.values())
        alive = [r.request_id for r in replies if not r.hung(now)]
        if alive:
            await self._store.renew_leases(alive, self._worker_id)
        silent = [r for r in replies if not r.wrote_since(now - self._interval)]
        if not silent:
            return
        last = await self._store.last_ids([r.request_id for r in silent])
        for reply, last_id in zip(silent, last, strict=True):
            found = fate(last_id, reply.attempt)
            if found is not Appended.OK:
                reply.refused(found)
