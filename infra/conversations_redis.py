"""Stored conversations in Redis, written by the intake (pending turns) and by history (finished ones).

Keys of one conversation share a hash tag, so that they live in one cluster slot::

    hr:conv:{<conversation key>}:turns    hash: request id -> JSON of a contracts.conversation.Turn
    hr:conv:{<conversation key>}:pending  hash: request id -> JSON list of the messages it adds
    hr:conv:{<conversation key>}:about    see infra.conversation_objects_redis

All live for ``history.retention_seconds`` after the last write. What was answered is a view of the outcomes
topic: history rebuilds it when Redis has lost it. Messages that were added by hand are only here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import redis.asyncio as redis
from pydantic import TypeAdapter, ValidationError
from redis.asyncio.client import Pipeline
from redis.exceptions import WatchError

from contracts.conversation import Turn, turn_of
from contracts.identity import conversation_key, time_part
from contracts.records import Message, OutcomeRecord
from contracts.token_stream import StreamsUnavailable

from .redis_errors import reachable
from .settings import HistorySettings

log = logging.getLogger(__name__)

_MESSAGES = TypeAdapter(list[Message])
#: How often a change is tried that others' changes come between.
_TRIES = 20


def about_key(tenant: str, conversation_id: str) -> str:
    """Key of what the Conversations API knows of a conversation."""
    return f"hr:conv:{{{conversation_key(tenant, conversation_id)}}}:about"


def conversation_keys(tenant: str, conversation_id: str) -> list[str]:
    """All keys of a conversation, its ``about`` first."""
    return [make(tenant, conversation_id) for make in (about_key, _turns_key, _pending_key)]


def _turns_key(tenant: str, conversation_id: str) -> str:
    return f"hr:conv:{{{conversation_key(tenant, conversation_id)}}}:turns"


def _pending_key(tenant: str, conversation_id: str) -> str:
    return f"hr:conv:{{{conversation_key(tenant, conversation_id)}}}:pending"


class Conversations:
    """The conversations of all tenants.

    Every method raises :class:`contracts.token_stream.StreamsUnavailable` when Redis cannot be reached
    within its deadline, and is idempotent by request id.
    """

    def __init__(self, client: redis.Redis, settings: HistorySettings) -> None:
        self._redis: Any = client  # redis-py types replies for every protocol version at once
        self._settings = settings

    async def add_pending(
        self, tenant: str, conversation_id: str, request_id: str, messages: Sequence[Message]
    ) -> None:
        """Note at acceptance what a request adds, until its outcome is stored.

        Whoever loads the conversation meanwhile finds the request here and its state in its token stream.
        """
        key = _pending_key(tenant, conversation_id)
        async with reachable(), self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(key, request_id, _MESSAGES.dump_json(list(messages)))
            pipe.expire(key, self._settings.retention_seconds)
            await pipe.execute()

    async def drop_pending(self, tenant: str, conversation_id: str, request_id: str) -> None:
        """Take a note back: the request was not accepted after all, or its stream is gone."""
        async with reachable():
            await self._redis.hdel(_pending_key(tenant, conversation_id), request_id)

    async def store(self, outcome: OutcomeRecord) -> None:
        """Keep a finished turn if it counts, and drop its pending note, in one step.

        Turns that do not count are not kept, so they displace none that do. A request without a
        conversation changes nothing.
        """
        if outcome.conversation_id is None:
            return
        turns = _turns_key(outcome.tenant, outcome.conversation_id)
        pending = _pending_key(outcome.tenant, outcome.conversation_id)
        turn = turn_of(outcome)
        async with reachable():
            async with self._redis.pipeline(transaction=True) as pipe:
                if turn.counts:
                    self._add(pipe, outcome.tenant, outcome.conversation_id, turn)
                pipe.hdel(pending, turn.request_id)
                pipe.hlen(turns)
                kept = (await pipe.execute())[-1]
            await self._trim(turns, kept)

    async def append(self, tenant: str, conversation_id: str, turn: Turn) -> None:
        """Add a turn that no request made. Idempotent by its id: what is there already stays as it is."""
        turns = _turns_key(tenant, conversation_id)
        async with reachable():
            async with self._redis.pipeline(transaction=True) as pipe:
                self._add(pipe, tenant, conversation_id, turn)
                pipe.hlen(turns)
                kept = (await pipe.execute())[-1]
            await self._trim(turns, kept)

    async def remove(self, tenant: str, conversation_id: str, turn: Turn, position: int) -> None:
        """Take one message of a turn out for good, text included, whether or not the turn is stored yet."""
        turns = _turns_key(tenant, conversation_id)
        for _ in range(_TRIES):
            async with reachable(), self._redis.pipeline(transaction=True) as pipe:
                await pipe.watch(turns)
                raw = await pipe.hget(turns, turn.request_id)
                now = turn if raw is None else Turn.model_validate_json(raw)
                pipe.multi()
                pipe.hset(turns, turn.request_id, now.without(position).model_dump_json())
                self._prolong(pipe, tenant, conversation_id)
                try:
                    await pipe.execute()
                except WatchError:
                    continue
                return
        raise StreamsUnavailable("a conversation changes all the time")

    def _add(self, pipe: Pipeline, tenant: str, conversation_id: str, turn: Turn) -> None:
        # What came first stays: an outcome that comes again brings back nothing that was taken out.
        pipe.hsetnx(_turns_key(tenant, conversation_id), turn.request_id, turn.model_dump_json())
        self._prolong(pipe, tenant, conversation_id)

    def _prolong(self, pipe: Pipeline, tenant: str, conversation_id: str) -> None:
        for key in (about_key(tenant, conversation_id), _turns_key(tenant, conversation_id)):
            pipe.expire(key, self._settings.retention_seconds)

    async def _trim(self, turns: str, kept: int) -> None:
        if kept > self._settings.max_turns:
            ids = sorted(await self._redis.hkeys(turns), key=lambda raw: time_part(raw.decode()))
            await self._redis.hdel(turns, *ids[: -self._settings.max_turns])

    async def load(
        self, tenant: str, conversation_id: str
    ) -> tuple[list[Turn], dict[str, list[Message]]]:
        """Finished turns, oldest first, and the messages of requests not stored yet, by request id.

        An unknown conversation is an empty one.
        """
        async with reachable(), self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(_turns_key(tenant, conversation_id))
            pipe.hgetall(_pending_key(tenant, conversation_id))
            raw_turns, raw_pending = await pipe.execute()
        turns: list[Turn] = []
        pending: dict[str, list[Message]] = {}
        for request_id in sorted(raw_turns, key=lambda raw: time_part(raw.decode("ascii", "replace"))):
            try:
                turns.append(Turn.model_validate_json(raw_turns[request_id]))
            except ValidationError:
                log.error("unreadable turn", extra={"request_id": request_id.decode("ascii", "replace")})
        for request_id in sorted(raw_pending.keys() - raw_turns.keys()):
            name = request_id.decode("ascii", "replace")
            try:
                pending[name] = _MESSAGES.validate_json(raw_pending[request_id])
            except ValidationError:
                log.error("unreadable pending turn", extra={"request_id": name})
        return turns, pending
