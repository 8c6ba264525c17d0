"""How far each pool is overloaded, from the schedulers to whoever accepts requests.

Key: ``hr:overload``, one bounded Redis Stream of all schedulers. Its ids are Redis's own time, so how old a
word is can be told without trust in anybody's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
import redis.asyncio as redis

from contracts.degraded import OverloadLevel, OverloadStep

from .redis_errors import reachable

_KEY: Final = "hr:overload"
#: A scheduler that has said nothing for so long says nothing about now.
FRESH_MS: Final = 3_000
#: Bounds the stream, and with it how many schedulers can have their say within :data:`FRESH_MS`.
_KEPT: Final = 256
_TTL_MS: Final = 60_000


class OverloadBoard:
    """What schedulers say, and what holds. Methods raise ``StreamsUnavailable`` when Redis is away."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis: Any = client  # redis-py types replies for every protocol version at once

    async def publish(self, scheduler_id: str, levels: Mapping[str, OverloadLevel]) -> None:
        """Say where each pool stands; it holds until the same scheduler says otherwise or falls silent."""
        said = {pool: [level.step.value, level.reason] for pool, level in levels.items()}
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            pipe.xadd(
                _KEY, {"s": scheduler_id, "p": orjson.dumps(said)}, maxlen=_KEPT, approximate=False
            )
            pipe.pexpire(_KEY, _TTL_MS)
            await pipe.execute()

    async def read(self) -> dict[str, OverloadLevel]:
        """The worst level of each pool among the latest fresh words of all schedulers.

        A pool that is absent has normal service.
        """
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.xrevrange(_KEY, count=_KEPT)
            (seconds, micros), entries = await pipe.execute()
        oldest_ms = seconds * 1000 + micros // 1000 - FRESH_MS
        heard: set[bytes] = set()
        worst: dict[str, OverloadLevel] = {}
        for entry_id, fields in entries:
            if int(entry_id.partition(b"-")[0]) < oldest_ms:
                break
            if fields[b"s"] in heard:
                continue
            heard.add(fields[b"s"])
            for pool, (step, reason) in orjson.loads(fields[b"p"]).items():
                level = OverloadLevel(OverloadStep(step), reason)
                if level.step.rank > worst.get(pool, OverloadLevel()).step.rank:
                    worst[pool] = level
        return worst
