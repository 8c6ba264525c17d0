"""The index of open requests, and when the topics were last made anew: what the reaper goes by.

``hr:open`` is a sorted set of request ids, scored with the time they were last known to be in somebody's
hands, Unix milliseconds: an entry is made with the stream, touched by the scheduler that holds the request,
and goes with the seal. It is a hint, never the truth: the reaper looks at the stream before it acts.

``hr:reaped`` is the set of requests the reaper ends at this moment: noted before the seal, and until the
outcome is published, so that a reaper that dies in between is followed up by the next one.

``hr:topics:<prefix>:born`` is the time at which the request topics were last created. Requests accepted
before had their records in topics that are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import redis.asyncio as redis

from .redis_errors import reachable

OPEN_KEY: Final = "hr:open"
_REAPED_KEY: Final = "hr:reaped"


class OpenRequests:
    """The index in Redis. Methods raise ``StreamsUnavailable`` when it cannot be reached."""

    def __init__(self, client: redis.Redis, topic_prefix: str) -> None:
        self._redis: Any = client  # redis-py types replies for every protocol version at once
        self._born_key = f"hr:topics:{topic_prefix}:born"

    async def touch(self, request_ids: Sequence[str], when_ms: int) -> None:
        """Say that these requests are in good hands, as of ``when_ms``; those not in the index stay out."""
        if not request_ids:
            return
        pairs = [part for request_id in request_ids for part in (when_ms, request_id)]
        async with reachable():
            await self._redis.execute_command("ZADD", OPEN_KEY, "XX", *pairs)

    async def untouched(self, since_ms: int, limit: int) -> list[str]:
        """Up to ``limit`` requests nobody has touched since ``since_ms``, the longest first."""
        async with reachable():
            found = await self._redis.zrangebyscore(OPEN_KEY, "-inf", since_ms, start=0, num=limit)
        return [request_id.decode() for request_id in found]

    async def drop(self, request_ids: Sequence[str]) -> None:
        """Take requests out of the index."""
        if request_ids:
            async with reachable():
                await self._redis.zrem(OPEN_KEY, *request_ids)

    async def ending(self, request_id: str) -> None:
        """Note that the reaper is about to end a request."""
        async with reachable():
            await self._redis.sadd(_REAPED_KEY, request_id)

    async def ended(self, request_id: str) -> None:
        """The request is sealed and its outcome is published, or it was not ours to end."""
        async with reachable():
            await self._redis.srem(_REAPED_KEY, request_id)

    async def half_ended(self, limit: int) -> list[str]:
        """Up to ``limit`` requests that a reaper has not finished ending."""
        async with reachable():
            found = await self._redis.srandmember(_REAPED_KEY, limit)
        return [request_id.decode() for request_id in found]

    async def topics_born(self, when_ms: int) -> None:
        """The request topics were created at ``when_ms``: what was in them before is gone."""
        async with reachable():
            await self._redis.set(self._born_key, when_ms)

    async def topics_born_ms(self) -> int:
        """When the request topics were last created, Unix milliseconds; 0 = not known."""
        async with reachable():
            raw = await self._redis.get(self._born_key)
        return int(raw) if raw is not None else 0
