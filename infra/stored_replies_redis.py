"""Kept replies (``store: true``) in Redis, written by the intake (accepted) and by history (ended).

    hr:{<request id>}:kept               hash: begun, ended, messages, metadata, model, status
    hr:{<tenant digest>}:kept:<kind>     the ids of a tenant's ended ones; ids order by time of acceptance

What was written first stays, so that a repeat of an outcome changes nothing that came later: new metadata
stays, and a deleted reply, whose fields are empty, is not made again. A reply lives for
``stored.retention_seconds`` after its end, or after its acceptance while it has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis.asyncio as redis
from pydantic import TypeAdapter

from contracts.batch import tenant_digest
from contracts.identity import is_request_id
from contracts.keep import ReplyKind
from contracts.records import Message
from contracts.stored_reply import StoredReply
from contracts.tiers import Status

from .redis_errors import reachable
from .settings import StoredSettings

#: Index entries looked at in one round trip.
_STEP: Final = 100
_MESSAGES: Final = TypeAdapter(list[Message])
_METADATA: Final = TypeAdapter(dict[str, str])
_APART: Final = {"messages", "metadata"}
_DELETED: Final = b""


@dataclass(frozen=True, slots=True)
class ReplyPage:
    """A part of a list.

    Attributes:
        replies: without their ``messages``, so that a page is small.
        has_more: whether there are more after them.
    """

    replies: list[StoredReply]
    has_more: bool


class StoredReplies:
    """The kept replies of all tenants. Methods raise ``StreamsUnavailable`` when Redis cannot be reached.

    A reply of another tenant is not there, as an unknown or deleted one is not.
    """

    def __init__(self, client: redis.Redis, settings: StoredSettings) -> None:
        self._redis: Any = client  # redis-py types replies for every protocol version at once
        self._settings = settings

    async def put(self, reply: StoredReply) -> None:
        """Keep a reply as it is at acceptance or at its end. Idempotent; the end wins over the acceptance.

        A tenant's oldest replies make room for one that is over ``stored.tenant_replies``.
        """
        key = _key(reply.id)
        ended = reply.status is not None
        async with reachable():
            if not ended and await self._redis.exists(key):
                return
        async with reachable(), self._redis.pipeline(transaction=True) as pipe:
            pipe.hsetnx(key, "ended" if ended else "begun", reply.model_dump_json(exclude=_APART))
            pipe.hsetnx(key, "messages", _MESSAGES.dump_json(reply.messages))
            pipe.hsetnx(key, "metadata", _METADATA.dump_json(reply.metadata))
            if reply.status is not None:
                pipe.hset(key, mapping={"status": reply.status.value, "model": reply.model})
                pipe.hdel(key, "begun")
            pipe.hget(key, "ended")
            pipe.expireat(key, self._expires(reply))
            now_ended = (await pipe.execute())[-2]
        if ended and now_ended != _DELETED:
            await self._add_to_index(reply)

    async def drop(self, request_id: str) -> None:
        """Take back a reply whose request was not accepted after all."""
        async with reachable():
            await self._redis.unlink(_key(request_id))

    async def get(self, tenant: str, request_id: str) -> StoredReply | None:
        """A reply of this tenant."""
        if not is_request_id(request_id):
            return None
        fields = ("ended", "begun", "messages", "metadata")
        async with reachable():
            ended, begun, messages, metadata = await self._redis.hmget(_key(request_id), fields)
        body = begun if ended is None else ended
        if not body or messages is None or metadata is None:
            return None
        reply = StoredReply.model_validate_json(body)
        if reply.tenant != tenant:
            return None
        apart = {
            "messages": _MESSAGES.validate_json(messages),
            "metadata": _METADATA.validate_json(metadata),
        }
        return reply.model_copy(update=apart)

    async def page(
        self,
        tenant: str,
        kind: ReplyKind,
        *,
        after: str | None = None,
        limit: int = 20,
        ascending: bool = True,
        model: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> ReplyPage:
        """A tenant's completed replies by time of acceptance.

        Args:
            after: begin after this id, whether or not it is there.
            limit: most replies of the page.
            ascending: the oldest first.
            model: only of this one.
            metadata: only with at least these pairs.
        """
        index = _index_key(tenant, kind)
        found: list[StoredReply] = []
        while True:
            ids = await self._ids(index, after, ascending)
            wanted = await self._matching(index, ids, model, metadata or {})
            found += await self._bodies(wanted[: limit + 1 - len(found)])
            if len(found) > limit or len(ids) < _STEP:
                return ReplyPage(found[:limit], len(found) > limit)
            after = ids[-1]

    async def set_metadata(
        self, tenant: str, request_id: str, metadata: Mapping[str, str]
    ) -> StoredReply | None:
        """Replace the metadata; returns the reply as it is now, or None where there is none."""
        reply = await self.get(tenant, request_id)
        if reply is None:
            return None
        changed = reply.model_copy(update={"metadata": dict(metadata)})
        key = _key(request_id)
        async with reachable(), self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(key, "metadata", _METADATA.dump_json(changed.metadata))
            pipe.expireat(key, self._expires(changed))  # it may have expired just now
            await pipe.execute()
        return changed

    async def delete(self, tenant: str, request_id: str) -> bool:
        """Delete a reply for good; False where there is none. One that has not ended is not kept."""
        reply = await self.get(tenant, request_id)
        if reply is None:
            return False
        key = _key(request_id)
        emptied = dict.fromkeys(("ended", "messages", "metadata"), _DELETED)
        async with reachable():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hset(key, mapping=emptied)
                pipe.hdel(key, "begun", "model", "status")
                pipe.expireat(key, self._expires(reply))
                await pipe.execute()
            await self._redis.zrem(_index_key(tenant, reply.kind), request_id)
        return True

    def _expires(self, reply: StoredReply) -> int:
        since = reply.created if reply.ended is None else reply.ended
        return since + self._settings.retention_seconds

    async def _add_to_index(self, reply: StoredReply) -> None:
        index = _index_key(reply.tenant, reply.kind)
        async with reachable(), self._redis.pipeline(transaction=True) as pipe:
            pipe.zadd(index, {reply.id: 0})
            pipe.expire(index, self._settings.retention_seconds)
            pipe.zrange(index, 0, -self._settings.tenant_replies - 1)
            surplus = (await pipe.execute())[-1]
        if surplus:
            async with reachable(), self._redis.pipeline(transaction=False) as pipe:
                for member in surplus:
                    pipe.unlink(_key(member.decode()))
                pipe.execute_command("ZREM", index, *surplus)
                await pipe.execute()

    async def _ids(self, index: str, after: str | None, ascending: bool) -> list[str]:
        past = f"({after}" if after is not None else None
        async with reachable():
            if ascending:
                raw = await self._redis.zrangebylex(index, past or "-", "+", start=0, num=_STEP)
            else:
                raw = await self._redis.zrevrangebylex(index, past or "+", "-", start=0, num=_STEP)
        return [member.decode() for member in raw]

    async def _matching(
        self, index: str, ids: Sequence[str], model: str | None, metadata: Mapping[str, str]
    ) -> list[str]:
        """Those of these ids that are completed and pass the filters; expired ones leave the index."""
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            for request_id in ids:
                pipe.hmget(_key(request_id), "status", "model", "metadata")
            answers = await pipe.execute()
        matching: list[str] = []
        gone: list[str] = []
        for request_id, (status, its_model, its_metadata) in zip(ids, answers, strict=True):
            if status is None or not its_metadata:
                gone.append(request_id)
            elif (
                status == Status.COMPLETED.value.encode()
                and (model is None or its_model == model.encode())
                and (not metadata or metadata.items() <= _METADATA.validate_json(its_metadata).items())
            ):
                matching.append(request_id)
        if gone:
            async with reachable():
                await self._redis.zrem(index, *gone)
        return matching

    async def _bodies(self, ids: Sequence[str]) -> list[StoredReply]:
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            for request_id in ids:
                pipe.hmget(_key(request_id), "ended", "metadata")
            answers = await pipe.execute()
        return [
            StoredReply.model_validate_json(ended).model_copy(
                update={"metadata": _METADATA.validate_json(metadata)}
            )
            for ended, metadata in answers
            if ended and metadata
        ]


def _key(request_id: str) -> str:
    return f"hr:{{{request_id}}}:kept"


def _index_key(tenant: str, kind: ReplyKind) -> str:
    return f"hr:{{{tenant_digest(tenant)}}}:kept:{kind}"
