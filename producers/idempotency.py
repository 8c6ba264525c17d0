"""Idempotency keys: a repeated call attaches to the request its first one made.

A key belongs to a tenant and to one body. It is claimed before the request is accepted and given back when
the acceptance fails, so a client that repeats a call because it heard nothing gets the same request, and
one that repeats a refused call is judged anew. So is one that repeats a call whose request has failed
without a word of text through no fault of the client's (a 5xx): SDKs repeat these with the same key.

Key: ``hr:idem:{<digest of tenant and key>}`` -> JSON of :class:`Claim`, for :data:`KEEP_SECONDS`.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson
import redis.asyncio as redis
from pydantic import BaseModel, ConfigDict
from redis.exceptions import WatchError

from contracts.errors import ApiError, ErrorCode
from contracts.reply import Reply
from infra.redis_errors import reachable
from infra.stream_redis import RedisTokenStreams

#: As long as the official client and other SDKs may still retry, and then some.
KEEP_SECONDS: Final = 86_400
#: A claim whose stream does not exist after so long belongs to a call that died half-way.
_ACCEPTING_MS: Final = 15_000
_POLL_SECONDS: Final = 0.02
_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")


class Claim(BaseModel):
    """What a key stands for."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    request_id: str
    body_digest: str
    claimed_ms: int


@dataclass(frozen=True, slots=True)
class Once:
    """A call that may come again.

    Attributes:
        key: the client's key.
        digest: digest of the body it goes with.
    """

    key: str
    digest: str


def once_of(key: str | None, body: object) -> Once | None:
    """The key and body of a call, or None for a call without a key.

    The order of the body's fields does not matter, nor whether it streams.

    Raises:
        ApiError: the key is not 1 to 255 visible ASCII characters, or the body cannot be compared.
    """
    if key is None:
        return None
    if not _KEY.fullmatch(key):
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            "The idempotency key must be 1 to 255 visible ASCII characters.",
            param="Idempotency-Key",
        )
    compared = body
    if isinstance(body, dict):
        compared = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
    try:
        text = orjson.dumps(compared, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # deeper than orjson writes, though it could read it
        raise ApiError(
            ErrorCode.INVALID_REQUEST, "The body nests too deep for a call with an idempotency key."
        ) from None
    return Once(key, hashlib.sha256(text).hexdigest())


class IdempotencyKeys:
    """The claims of all tenants. Methods raise ``StreamsUnavailable`` when Redis cannot be reached."""

    def __init__(
        self, client: redis.Redis, streams: RedisTokenStreams, now_ms: Callable[[], int]
    ) -> None:
        self._redis: Any = client  # redis-py types replies for every protocol version at once
        self._streams = streams
        self._now_ms = now_ms

    async def claim(self, tenant: str, once: Once, request_id: str) -> str | None:
        """Claim a key for ``request_id``; None when it is ours now, else the request it stands for.

        Waits for a call that is being accepted at this moment, until its stream exists.

        Raises:
            ApiError: ``idempotency_mismatch``: the key was used with another body.
        """
        name = _name(tenant, once.key)
        mine = Claim(request_id=request_id, body_digest=once.digest, claimed_ms=self._now_ms())
        give_up = time.monotonic() + _ACCEPTING_MS / 1000
        while True:
            if await self._set(name, mine):
                return None
            held = await self._get(name)
            if held is None:
                continue
            if held.request_id == request_id:
                return None  # our own claim, set by an attempt whose answer was lost
            if held.body_digest != once.digest:
                raise ApiError(
                    ErrorCode.IDEMPOTENCY_MISMATCH,
                    "This idempotency key was used with another body.",
                    param="Idempotency-Key",
                )
            if await self._streams.owner(held.request_id) is not None:
                if not await self._failed_for_nothing(held.request_id):
                    return held.request_id
                await self.release(tenant, once.key, held.request_id)
            elif self._now_ms() - held.claimed_ms > _ACCEPTING_MS or time.monotonic() > give_up:
                await self.release(tenant, once.key, held.request_id)
            else:
                await asyncio.sleep(_POLL_SECONDS)

    async def release(self, tenant: str, key: str, request_id: str) -> None:
        """Give a claim back if ``request_id`` still holds it."""
        name = _name(tenant, key)
        async with reachable(), self._redis.pipeline(transaction=True) as pipe:
            await pipe.watch(name)
            raw = await pipe.get(name)
            if raw is None or Claim.model_validate_json(raw).request_id != request_id:
                return
            pipe.multi()
            pipe.delete(name)
            try:
                await pipe.execute()
            except WatchError:
                return  # somebody else has given it back, and perhaps claimed it anew

    async def _failed_for_nothing(self, request_id: str) -> bool:
        """Whether it has ended in a server's error, and nobody has got anything of it."""
        reply = Reply().extend(await self._streams.read_all(request_id))
        error = reply.terminal.error if reply.terminal is not None else None
        return error is not None and error.status >= 500 and not reply.choices

    async def _set(self, name: str, claim: Claim) -> bool:
        async with reachable():
            value = claim.model_dump_json()
            return bool(await self._redis.set(name, value, nx=True, ex=KEEP_SECONDS))

    async def _get(self, name: str) -> Claim | None:
        async with reachable():
            raw = await self._redis.get(name)
        return None if raw is None else Claim.model_validate_json(raw)


def _name(tenant: str, key: str) -> str:
    digest = hashlib.sha256(f"{len(tenant)}:{tenant}{key}".encode()).hexdigest()
    return f"hr:idem:{{{digest[:32]}}}"
