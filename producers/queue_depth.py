"""How many requests wait, as the scheduler last said: what admission looks at."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import redis.asyncio as redis

from contracts.errors import ApiError, ErrorCode
from contracts.tiers import QueueClass
from infra.pipeline_health import DEPTH_KEY
from infra.redis_errors import reachable

from .fresh_copy import FreshCopy

_RETRY_AFTER_SECONDS: Final = 5


class QueueDepth:
    """The waiting requests of each class.

    A missing figure (no scheduler is up, so the key has run out) counts as zero: the requests wait in Kafka,
    each under its own deadline.
    """

    def __init__(self, client: redis.Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis: Any = client  # redis-py types replies for every protocol version at once
        self._depths = FreshCopy(self._read, clock)

    async def check(self, queue_class: QueueClass, limit: int) -> None:
        """Refuse when so many wait in the class.

        Raises:
            ApiError: ``queue_full``.
            StreamsUnavailable: Redis cannot be reached.
        """
        depths = await self._depths.get()
        if int(depths.get(queue_class.value.encode(), 0)) >= limit:
            raise ApiError(
                ErrorCode.QUEUE_FULL,
                "Too many requests are waiting; try again later.",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )

    async def close(self) -> None:
        """End a renewal under way."""
        await self._depths.close()

    async def _read(self) -> dict[bytes, bytes]:
        async with reachable():
            depths: dict[bytes, bytes] = await self._redis.hgetall(DEPTH_KEY)
            return depths
