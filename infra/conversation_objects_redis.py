"""What the Conversations API knows of a conversation beside its turns (:mod:`infra.conversations_redis`).

    hr:conv:{<conversation key>}:about    JSON of a contracts.conversation.ConversationFacts
    hr:{<tenant digest>}:conversations    the ids of a tenant's conversations; ids order by time of creation

A conversation exists for the API as long as its facts do: ``history.retention_seconds`` after anything was
last added or changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis.asyncio as redis

from contracts.batch import tenant_digest
from contracts.conversation import ConversationFacts

from .conversations_redis import about_key, conversation_keys
from .redis_errors import reachable
from .settings import HistorySettings


class ConversationObjects:
    """The conversations that callers made. Methods raise ``StreamsUnavailable`` when Redis cannot be reached.

    A conversation of another tenant is not there, as an unknown or deleted one is not: keys are made of
    tenant and id.
    """

    def __init__(self, client: redis.Redis, settings: HistorySettings) -> None:
        self._redis: Any = client  # redis-py types replies for every protocol version at once
        self._settings = settings

    async def create(self, tenant: str, conversation_id: str, facts: ConversationFacts) -> None:
        """Make a conversation. A tenant's oldest make room for one over ``history.tenant_conversations``."""
        index = _index_key(tenant)
        life = self._settings.retention_seconds
        async with reachable():
            await self._redis.set(about_key(tenant, conversation_id), facts.model_dump_json(), ex=life)
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.zadd(index, {conversation_id: 0})
                pipe.expire(index, life)
                pipe.zrange(index, 0, -self._settings.tenant_conversations - 1)
                surplus = [member.decode() for member in (await pipe.execute())[-1]]
            for oldest in surplus:
                await self._redis.unlink(*conversation_keys(tenant, oldest))
            if surplus:
                await self._redis.zrem(index, *surplus)

    async def get(self, tenant: str, conversation_id: str) -> ConversationFacts | None:
        """A conversation of this tenant."""
        async with reachable():
            raw = await self._redis.get(about_key(tenant, conversation_id))
        return None if raw is None else ConversationFacts.model_validate_json(raw)

    async def set_metadata(
        self, tenant: str, conversation_id: str, metadata: Mapping[str, str]
    ) -> ConversationFacts | None:
        """Replace the metadata; returns the facts as they are now, or None where there is no conversation."""
        facts = await self.get(tenant, conversation_id)
        if facts is None:
            return None
        changed = facts.model_copy(update={"metadata": dict(metadata)})
        key = about_key(tenant, conversation_id)
        async with reachable():
            # Only where it is still there: it may have been deleted meanwhile.
            done = await self._redis.set(
                key, changed.model_dump_json(), ex=self._settings.retention_seconds, xx=True
            )
        return changed if done else None

    async def delete(self, tenant: str, conversation_id: str) -> bool:
        """Delete a conversation with its items; False where there is none.

        A turn that ends later belongs to no conversation that anybody finds.
        """
        about, *others = conversation_keys(tenant, conversation_id)
        async with reachable():
            if not await self._redis.unlink(about):
                return False
            await self._redis.unlink(*others)
            await self._redis.zrem(_index_key(tenant), conversation_id)
        return True


def _index_key(tenant: str) -> str:
    return f"hr:{{{tenant_digest(tenant)}}}:conversations"
