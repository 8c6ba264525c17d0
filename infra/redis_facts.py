"""Whether a Redis is fit to keep token streams: what it says of itself, and what of that is wrong.

A stream that Redis evicts takes a running reply with it, so an evicting ``maxmemory-policy`` is no setting
for this Redis (a cache for KV blocks may well have one: that is another instance).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict
from redis.exceptions import RedisError, ResponseError

from contracts.token_stream import StreamsUnavailable

from .redis_connections import connect
from .redis_errors import reachable
from .settings import RedisSettings, SettingsError

log = logging.getLogger(__name__)

UNKNOWN: Final = "unknown"
_SAFE: Final = "noeviction"
_NEARLY_FULL: Final = 0.9
#: How often running roles look again: somebody may change the policy, and memory fills up.
_INTERVAL_SECONDS: Final = 30.0


class RedisFacts(BaseModel):
    """A Redis, as it describes itself.

    Attributes:
        policy: ``maxmemory-policy``; ``unknown`` where it may not be asked.
        maxmemory_bytes: 0 = no limit; None = not known.
        used_bytes: memory in use; None = not known.
        aof: whether it keeps an append-only file; None = not known.
        warning: what is wrong with it, in one or more sentences; None = nothing.
    """

    model_config = ConfigDict(frozen=True)

    policy: str = UNKNOWN
    maxmemory_bytes: int | None = None
    used_bytes: int | None = None
    aof: bool | None = None
    warning: str | None = None

    @property
    def evicts(self) -> bool:
        """Whether it is known to evict keys when its memory is full."""
        return self.policy not in (_SAFE, UNKNOWN)


def facts_of(info: Mapping[str, Any]) -> RedisFacts:
    """The facts in an answer of INFO (``memory`` and ``persistence``), with a verdict. Pure."""
    aof = info.get("aof_enabled")
    facts = RedisFacts(
        policy=str(info.get("maxmemory_policy", UNKNOWN)),
        maxmemory_bytes=_whole(info.get("maxmemory")),
        used_bytes=_whole(info.get("used_memory")),
        aof=None if aof is None else bool(int(aof)),
    )
    return facts.model_copy(update={"warning": " ".join(_faults(facts)) or None})


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _faults(facts: RedisFacts) -> list[str]:
    found = []
    if facts.evicts:
        found.append(
            f"The maxmemory-policy is {facts.policy}: Redis drops running replies when its memory is "
            f"full; set it to {_SAFE}."
        )
    elif facts.policy == UNKNOWN:
        found.append(f"The maxmemory-policy cannot be read: make sure that it is {_SAFE}.")
    if facts.aof is False:
        found.append(
            "There is no append-only file: a restart of Redis loses every reply; set appendonly."
        )
    if facts.maxmemory_bytes and (facts.used_bytes or 0) >= _NEARLY_FULL * facts.maxmemory_bytes:
        share = round(100 * (facts.used_bytes or 0) / facts.maxmemory_bytes)
        found.append(
            f"{share} % of its memory is used: when it is full, new requests are refused (503)."
        )
    return found


async def read_facts(settings: RedisSettings) -> RedisFacts:
    """Ask a Redis, over a connection made for it.

    Raises:
        StreamsUnavailable: it cannot be reached. That it refuses to tell is no failure.
    """
    client: Any = connect(settings, steady=True)
    try:
        return await _ask(client)
    finally:
        await client.aclose()


async def _ask(client: Any) -> RedisFacts:
    found: dict[str, Any] = {}
    async with reachable():
        for section in ("memory", "persistence"):
            try:
                found |= await client.info(section)
            except ResponseError as error:  # an ACL, or a managed Redis without this command
                log.debug("INFO refused", extra={"section": section, "error": str(error)[:200]})
    return facts_of(found)


async def require_fit(settings: RedisSettings) -> None:
    """Warn about a Redis that is not fit for token streams, and refuse one that evicts.

    Raises:
        SettingsError: it evicts keys, and ``redis.allow_eviction`` is off.
        StreamsUnavailable: it cannot be reached.
    """
    facts = await read_facts(settings)
    if facts.evicts and not settings.allow_eviction:
        raise SettingsError(
            f"the Redis for token streams has maxmemory-policy {facts.policy}, so it may drop running "
            f"replies: set {_SAFE}, or redis.allow_eviction = true to run all the same"
        )
    if facts.warning is not None:
        log.warning("Redis is not fit for token streams", extra={"warning": facts.warning})


class RedisWatch:
    """Looks at a Redis from time to time while a role runs, and warns when the verdict changes."""

    def __init__(self, settings: RedisSettings, interval_seconds: float = _INTERVAL_SECONDS) -> None:
        self._settings = settings
        self._interval = interval_seconds
        self._said: str | None = None

    async def run(self) -> None:
        """Watch until cancelled."""
        client: Any = connect(self._settings, steady=True)
        try:
            self._said = await self._verdict(client)
            while True:
                await asyncio.sleep(self._interval)
                await self._look(client)
        finally:
            await client.aclose()

    async def _look(self, client: Any) -> None:
        verdict = await self._verdict(client)
        if verdict == self._said:
            return
        self._said = verdict
        if verdict is None:
            log.info("Redis is fit for token streams again")
        else:
            log.warning("Redis is not fit for token streams", extra={"warning": verdict})

    async def _verdict(self, client: Any) -> str | None:
        try:
            return (await _ask(client)).warning
        except (StreamsUnavailable, RedisError, OSError):
            return self._said  # whoever needs it says so
