"""The limits' counters in Redis, shared by all gateways and edges: one atomic script takes, one settles.

Per scope (a key, a tenant, a tier) under one hash tag, so that a script may touch several in Redis Cluster:
``hr:{limits}:<scope>:r`` and ``:t`` are the requests and tokens of the last minute in buckets of a second,
``:o`` the requests with a permit and ``:q`` the enqueued ones, with the time at which each lapses by itself,
``:h`` the tokens of the enqueued ones, ``:d`` the requests and tokens of the UTC day. What a request has
reserved, and in which scopes, is in ``hr:{limits}:taken:<request id>``; ``hr:{limits}:unsettled`` names all
of these, with the time somebody last looked at each. Every key has a lifetime. The clock is Redis's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import redis.asyncio as redis

from contracts.limits import Allowance, RateLimits
from contracts.token_stream import StreamsUnavailable

from .redis_errors import reachable
from .settings import LimitSettings

_TAKE: Final = Path(__file__).with_name("limits_take.lua").read_text()
_SETTLE: Final = Path(__file__).with_name("limits_settle.lua").read_text()
_PREFIX: Final = "hr:{limits}:"
_PARTS: Final = ("r", "t", "o", "q", "h", "d")
_UNSETTLED: Final = f"{_PREFIX}unsettled"
_TRY_AGAIN_SECONDS: Final = 1.0


class LimitKind(IntEnum):
    """What was reached, as ``limits_take.lua`` numbers it."""

    REQUESTS_PER_MINUTE = 1
    TOKENS_PER_MINUTE = 2
    CONCURRENT = 3
    REQUESTS_PER_DAY = 4
    TOKENS_PER_DAY = 5
    ENQUEUED_TOKENS = 6


@dataclass(frozen=True, slots=True)
class LimitScope:
    """Whose limits.

    Attributes:
        name: ``key:<id>``, ``tenant:<name>`` or ``tier:<name>``, from the configuration.
    """

    name: str
    limits: LimitSettings


@dataclass(frozen=True, slots=True)
class LimitReached:
    """Nothing was taken.

    Attributes:
        retry_ms: when it may fit, as far as time alone tells; None: it never will, it is larger than a limit.
        held: request ids that fill a scope, up to 64 of the oldest, where only their end brings room.
    """

    kind: LimitKind
    retry_ms: int | None
    rate_limits: RateLimits
    held: tuple[str, ...]


class LimitCounters:
    """The counters.

    Methods raise ``StreamsUnavailable`` when Redis cannot be reached or takes too long; after that at once,
    but for one call a second, until it answers again.

    Args:
        client: for nobody else: a burst of calls waits here for its connections, as the pool refuses those
            that it has none for.
        timeout_seconds: deadline of a call, once it has a connection.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        client: redis.Redis,
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis: Any = client  # redis-py types replies for every protocol version at once
        self._connections = asyncio.Semaphore(client.connection_pool.max_connections)
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._away = False
        self._try_again_at = 0.0
        # Scripts that redis-py sends again when a restart has emptied the cache (H5).
        self._take = self._redis.register_script(_TAKE)
        self._settle = self._redis.register_script(_SETTLE)

    async def take(
        self,
        request_id: str,
        scopes: Sequence[LimitScope],
        tokens: int,
        lapse_ms: int,
        ended: Sequence[str] = (),
    ) -> RateLimits | LimitReached:
        """Take a request's part of every limit of all scopes, or nothing. Idempotent by request id.

        Args:
            tokens: what it may use at most.
            lapse_ms: longer than it can possibly run: then its permit and its reservation lapse.
            ended: requests known to have ended, whose permits are free.
        """
        names = [scope.name for scope in scopes]
        arguments: list[str | int] = [request_id, tokens, lapse_ms, "\n".join(names), len(ended), *ended]
        for scope in scopes:
            arguments += _limits(scope.limits)
        async with self._answering():
            kind, retry, facts, held = await self._take(keys=_keys(request_id, names), args=arguments)
        rate_limits = RateLimits(_allowance(facts[0]), _allowance(facts[1]))
        if not kind:
            return rate_limits
        return LimitReached(
            LimitKind(kind),
            None if retry < 0 else int(retry),
            rate_limits,
            tuple(dict.fromkeys(raw.decode() for raw in held)),
        )

    async def settle(self, request_id: str, tokens_used: int) -> bool:
        """Put what was used in the place of what was reserved; False if there is nothing to settle (now)."""
        return await self._end(request_id, str(tokens_used), "")

    async def undo(self, request_id: str) -> bool:
        """Give everything back: the request was never accepted. False as of :meth:`settle`."""
        return await self._end(request_id, "0", "undo")

    async def unsettled(self, age_ms: int, limit: int) -> list[str]:
        """Up to ``limit`` requests that nobody has looked at for so long, the longest first."""
        async with self._answering():
            oldest_ms = await self._now_ms() - age_ms
            found = await self._redis.zrangebyscore(_UNSETTLED, "-inf", oldest_ms, start=0, num=limit)
        return [request_id.decode() for request_id in found]

    async def looked_at(self, request_ids: Sequence[str]) -> None:
        """These are still open: they are looked at again after the others."""
        if not request_ids:
            return
        async with self._answering():
            now_ms = await self._now_ms()
            pairs = [part for request_id in request_ids for part in (now_ms, request_id)]
            await self._redis.execute_command("ZADD", _UNSETTLED, "XX", *pairs)

    async def forget(self, request_ids: Sequence[str]) -> None:
        """There is nothing to settle of these: what they had reserved has lapsed."""
        if request_ids:
            async with self._answering():
                await self._redis.zrem(_UNSETTLED, *request_ids)

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        async with self._connections:
            if self._away:
                if self._clock() < self._try_again_at:
                    raise StreamsUnavailable("the limits' Redis did not answer a moment ago")
                self._try_again_at = self._clock() + _TRY_AGAIN_SECONDS
            try:
                async with asyncio.timeout(self._timeout_seconds), reachable():
                    yield
            except (StreamsUnavailable, TimeoutError) as error:
                self._away = True
                self._try_again_at = self._clock() + _TRY_AGAIN_SECONDS
                raise StreamsUnavailable(str(error) or "the limits' Redis takes too long") from error
            self._away = False

    async def _now_ms(self) -> int:
        seconds, micros = await self._redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def _end(self, request_id: str, used: str, how: str) -> bool:
        async with self._answering():
            names = await self._redis.hget(_taken_key(request_id), "scopes")
            if names is None:
                return False
            keys = _keys(request_id, names.decode().split("\n"))
            return bool(await self._settle(keys=keys, args=[request_id, used, how]))


def _limits(limits: LimitSettings) -> list[int]:
    every = (
        limits.requests_per_minute,
        limits.tokens_per_minute,
        limits.concurrent,
        limits.requests_per_day,
        limits.tokens_per_day,
        limits.enqueued_tokens,
    )
    return [-1 if limit is None else limit for limit in every]


def _keys(request_id: str, scopes: Sequence[str]) -> list[str]:
    return [
        _taken_key(request_id),
        _UNSETTLED,
        *(f"{_PREFIX}{scope}:{part}" for scope in scopes for part in _PARTS),
    ]


def _taken_key(request_id: str) -> str:
    return f"{_PREFIX}taken:{request_id}"


def _allowance(raw: list[int]) -> Allowance | None:
    limit, remaining, reset_ms = raw
    return None if limit < 0 else Allowance(limit, max(0, remaining), reset_ms / 1000)
