"""How many requests wait, as the scheduler last said: what admission looks at."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import redis.asyncio as redis
from redis.exceptions import RedisError

from contracts.errors import ApiError, ErrorCode
from contracts.tiers import QueueClass
from contracts.token_stream import StreamsUnavailable
from infra.pipeline_health import DEPTH_KEY

#: The scheduler writes a few times a second, so looking more often than this tells nothing new.
_FRESH_SECONDS: Final = 0.2
_RETRY_AFTER_SECONDS: Final = 5


class QueueDepth:
    """The waiting requests of each class, read at most once per :data:`_FRESH_SECONDS`.

    A missing figure (no scheduler is up, so the key has run out) counts as zero: the requests wait in
    Kafka, each under its own deadline.
    """

    def __init__(
        self, client: redis.Redis, limit: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis: Any = client  # redis-py types replies for every protocol version at once
        self._limit = limit
        self._clock = clock
        self._read_at: float | None = None
        self._depths: dict[bytes, bytes] = {}

    async def check(self, queue_class: QueueClass) -> None:
        """Refuse when the class is full.

        Raises:
            ApiError: ``queue_full``.
            StreamsUnavailable: Redis cannot be reached.
        """
        now = self._clock()
        if self._read_at is None or now - self._read_at >= _FRESH_SECONDS:
            try:
                self._depths = await self._redis.hgetall(DEPTH_KEY)
            except (RedisError, OSError, TimeoutError) as error:
                raise StreamsUnavailable(type(error).__name__) from error
            self._read_at = now
        if int(self._depths.get(queue_class.value.encode(), 0)) >= self._limit:
            raise ApiError(
                ErrorCode.QUEUE_FULL,
                "Too many requests are waiting; try again later.",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
