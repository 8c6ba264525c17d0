"""Who reads each request: hubs vouch for their readers here, and whoever may end a request looks here.

Key of a request: ``hr:{<request id>}:readers``, a sorted set. A hub's member is scored with the time until
which it vouches for its readers, the member ``left`` with the last time a hub's last reader left; both in
Unix milliseconds of Redis's own clock, so that the clocks of hubs and workers need not agree.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, Final

import redis.asyncio as redis

from contracts.absence import NOBODY, Sighting

from .redis_errors import reachable

#: How long a hub vouches for its readers at a time: a hub that dies is missed after so long.
VOUCH_MS: Final = 4_000
#: Longer than any grace time; a sealed stream takes the key with it.
_TTL_SECONDS: Final = 2 * 3_600
_LEFT: Final = b"left"
#: The clock is asked for again after so long.
_CLOCK_SECONDS: Final = 30.0


def readers_key(request_id: str) -> str:
    """Key of a request's readers."""
    return f"hr:{{{request_id}}}:readers"


class ReaderPresence:
    """Readers in Redis. Methods raise ``StreamsUnavailable`` when it cannot be reached."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis: Any = client  # redis-py types replies for every protocol version at once
        self._offset_ms = 0.0
        self._asked_at: float | None = None

    async def now_ms(self) -> int:
        """Unix milliseconds by Redis's clock."""
        began = time.monotonic()
        if self._asked_at is None or began - self._asked_at > _CLOCK_SECONDS:
            async with reachable():
                seconds, micros = await self._redis.time()
            self._asked_at = time.monotonic()
            self._offset_ms = seconds * 1000 + micros / 1000 - (began + self._asked_at) * 500
        return int(time.monotonic() * 1000 + self._offset_ms)

    async def vouch(self, hub: str, reading: Collection[str], left: Collection[str]) -> None:
        """Promise that ``hub`` reads the requests ``reading``, and say that it no longer reads ``left``."""
        if not reading and not left:
            return
        now_ms = await self.now_ms()
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            for request_id in reading:
                key = readers_key(request_id)
                pipe.execute_command("ZADD", key, now_ms + VOUCH_MS, hub)
                pipe.execute_command("EXPIRE", key, _TTL_SECONDS)
            for request_id in left:
                key = readers_key(request_id)
                pipe.execute_command("ZADD", key, now_ms, _LEFT)
                pipe.execute_command("ZREM", key, hub)
                pipe.execute_command("EXPIRE", key, _TTL_SECONDS)
            await pipe.execute()

    async def look(self, request_ids: Sequence[str]) -> tuple[int, list[Sighting]]:
        """Now (Unix milliseconds by Redis's clock), and what is known of each request's readers."""
        now_ms = await self.now_ms()
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            for request_id in request_ids:
                pipe.execute_command("ZREVRANGE", readers_key(request_id), 0, -1, "WITHSCORES")
            found = await pipe.execute()
        return now_ms, [_sighting(raw) for raw in found]


def _sighting(raw: list[Any]) -> Sighting:
    if not raw:
        return NOBODY
    # Pairs where redis-py parses the reply, a flat list where it does not.
    pairs = raw if isinstance(raw[0], (tuple, list)) else list(zip(raw[::2], raw[1::2], strict=True))
    scores = {member: int(float(score)) for member, score in pairs}
    left_ms = scores.pop(_LEFT, 0)
    return Sighting(max(scores.values(), default=0), left_ms)
