"""Which schedulers live, and how much waits at each of them, for the workers of a pool.

Key: ``hr:pool:{<pool>}:schedulers``, one bounded Redis Stream a pool. Its ids are Redis's own time, so how
old a word is can be told without trust in anybody's clock.
"""

from __future__ import annotations

from typing import Any, Final

import redis.asyncio as redis

#: Bounds the stream, and with it how many schedulers are known at once: a third of it.
_KEPT: Final = 96
_GONE: Final = -1


class SchedulerPresence:
    """Schedulers of one pool. Redis errors pass through: callers retry at their next interval."""

    def __init__(self, client: redis.Redis, pool: str, ttl_ms: int) -> None:
        """Whoever has said nothing for ``ttl_ms`` counts as gone."""
        self._redis: Any = client  # redis-py types replies for every protocol version at once
        self._key = f"hr:pool:{{{pool}}}:schedulers"
        self._ttl_ms = ttl_ms
        self._now_ms = 0

    async def announce(self, scheduler_id: str, backlog: int) -> None:
        """Say that a scheduler lives and that ``backlog`` choices wait there (scheduler side)."""
        await self._say(scheduler_id, backlog)

    async def leave(self, scheduler_id: str) -> None:
        """Say that a scheduler gives no more work, and that all it gave is on Kafka (scheduler side)."""
        await self._say(scheduler_id, _GONE)

    async def _say(self, scheduler_id: str, backlog: int) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.xadd(self._key, {"s": scheduler_id, "b": backlog}, maxlen=_KEPT, approximate=False)
            pipe.pexpire(self._key, self._ttl_ms)
            await pipe.execute()

    async def read(self) -> dict[str, int | None]:
        """The schedulers heard of lately, and how many choices wait at each (worker side).

        None = it has left.
        """
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            # Nothing that was too old at the last call can be young enough now.
            pipe.xrevrange(self._key, "+", max(0, self._now_ms - self._ttl_ms))
            (seconds, micros), entries = await pipe.execute()
        self._now_ms = seconds * 1000 + micros // 1000
        found: dict[str, int | None] = {}
        for entry_id, fields in entries:
            if int(entry_id.partition(b"-")[0]) <= self._now_ms - self._ttl_ms:
                break
            backlog = int(fields[b"b"])
            found.setdefault(fields[b"s"].decode(), None if backlog == _GONE else backlog)
        return found
