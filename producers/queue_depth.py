"""How many requests wait, as the scheduler last said: what admission looks at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import redis.asyncio as redis
from redis.exceptions import RedisError

from contracts.errors import ApiError, ErrorCode
from contracts.tiers import QueueClass
from contracts.token_stream import StreamsUnavailable
from infra.pipeline_health import DEPTH_KEY
from infra.tasks import end_tasks

#: The scheduler writes a few times a second, so looking more often than this tells nothing new.
_FRESH_SECONDS: Final = 0.2
_STALE_SECONDS: Final = 1.0
_RETRY_AFTER_SECONDS: Final = 5


class QueueDepth:
    """The waiting requests of each class, from a copy that is at most :data:`_STALE_SECONDS` old.

    A copy older than :data:`_FRESH_SECONDS` is still used, and renewed meanwhile, so that a steady flow of
    requests does not wait for it. A missing figure (no scheduler is up, so the key has run out) counts as
    zero: the requests wait in Kafka, each under its own deadline.
    """

    def __init__(
        self, client: redis.Redis, limit: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis: Any = client  # redis-py types replies for every protocol version at once
        self._limit = limit
        self._clock = clock
        self._read_at = float("-inf")
        self._depths: dict[bytes, bytes] = {}
        self._renewal: asyncio.Task[None] | None = None

    async def check(self, queue_class: QueueClass) -> None:
        """Refuse when the class is full.

        Raises:
            ApiError: ``queue_full``.
            StreamsUnavailable: Redis cannot be reached.
        """
        age = self._clock() - self._read_at
        if age >= _STALE_SECONDS:
            await self._read()
        elif age >= _FRESH_SECONDS and (self._renewal is None or self._renewal.done()):
            self._renewal = asyncio.create_task(self._renew())
        if int(self._depths.get(queue_class.value.encode(), 0)) >= self._limit:
            raise ApiError(
                ErrorCode.QUEUE_FULL,
                "Too many requests are waiting; try again later.",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )

    async def close(self) -> None:
        """End a renewal under way."""
        if self._renewal is not None:
            await end_tasks([self._renewal])

    async def _renew(self) -> None:
        try:
            await self._read()
        except StreamsUnavailable:
            pass  # the copy becomes stale, and then the failure is somebody's answer

    async def _read(self) -> None:
        now = self._clock()
        try:
            self._depths = await self._redis.hgetall(DEPTH_KEY)
        except (RedisError, OSError, TimeoutError) as error:
            raise StreamsUnavailable(type(error).__name__) from error
        self._read_at = now
