"""What a worker tells the schedulers of its pool, and the claim on its slot."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from redis.exceptions import RedisError

from contracts.worker_events import WorkerEvent
from infra.telemetry import KV_FREE, RUNNING

from .errors import WorkerError
from .protocols import Capacity

log = logging.getLogger(__name__)


class SlotLost(WorkerError):
    """Another worker holds this worker's slot: stop reading its partition, start anew with another."""


class Feed(Protocol):
    """The pool's feed; see :class:`infra.worker_feed_redis.WorkerFeed`."""

    async def publish(self, event: WorkerEvent) -> None:
        """Append an event."""

    async def keep_slot(self, worker_id: str, slot: int, ttl_ms: int) -> bool:
        """Renew a claim; False when it was lost."""


class Heartbeat:
    """Reports capacity at an interval, and at once when replies finish or acceptance changes.

    Attributes:
        accepting: whether this worker takes work; set through :meth:`set_accepting`.
    """

    def __init__(
        self,
        feed: Feed,
        worker_id: str,
        slot: int,
        *,
        interval_ms: int,
        slot_ttl_ms: int,
        capacity: Callable[[], Capacity],
        replies: Callable[[], int],
    ) -> None:
        """Reports for one worker.

        Args:
            replies: choices of requests this worker has taken; the engine may not know of all yet.
        """
        self._feed = feed
        self._worker_id = worker_id
        self._slot = slot
        self._interval = interval_ms / 1000
        self._slot_ttl_ms = slot_ttl_ms
        self._capacity = capacity
        self._replies = replies
        self._finished: list[str] = []
        self._wake = asyncio.Event()
        self.accepting = True

    def finished(self, request_id: str) -> None:
        """Report that a request has ended here, with the next event, which is sent at once."""
        self._finished.append(request_id)
        self._wake.set()

    def set_accepting(self, accepting: bool) -> None:
        """Change it, and report at once."""
        self.accepting = accepting
        self._wake.set()

    async def run(self) -> None:
        """Report until cancelled.

        Raises:
            SlotLost: the slot belongs to another worker.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._wake.clear()
            now = loop.time()
            try:
                if now >= due:
                    due = now + self._interval
                    if not await self._feed.keep_slot(self._worker_id, self._slot, self._slot_ttl_ms):
                        raise SlotLost(f"slot {self._slot}")
                await self.publish()
            except (RedisError, OSError) as error:
                log.warning("no heartbeat", extra={"error": type(error).__name__})
            try:
                # Not wait_for(): up to Python 3.11 it can swallow a cancellation that meets its result.
                async with asyncio.timeout(max(0.0, due - loop.time())):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def publish(self, handed_over: Sequence[str] = ()) -> None:
        """Send one event now; Redis errors pass through, and its news go with the next one.

        Args:
            handed_over: requests that are left to other workers.
        """
        capacity = self._capacity()
        finished, self._finished = self._finished, []
        running = max(capacity.running, self._replies())
        RUNNING.set(running)
        KV_FREE.set(capacity.kv_tokens_free)
        event = WorkerEvent(
            worker_id=self._worker_id,
            slot=self._slot,
            sent_ms=int(time.time() * 1000),
            max_seqs=capacity.max_seqs,
            running=running,
            kv_tokens_total=capacity.kv_tokens_total,
            kv_tokens_free=capacity.kv_tokens_free,
            accepting=self.accepting,
            finished=finished,
            handed_over=list(handed_over),
        )
        try:
            await self._feed.publish(event)
        except (RedisError, OSError):
            self._finished[:0] = finished
            raise
