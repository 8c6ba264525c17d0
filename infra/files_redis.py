"""What is known of files, in Redis; their content is on the storage.

    hr:{<tenant digest>}:files   hash: file id -> JSON of a contracts.batch.FileRecord
    hr:files:expiring            <tenant digest>:<file id>, scored with when it expires (Unix ms)
    hr:{<file id>}:used          the open batches that read it

A tenant's files are one hash, so a file of somebody else is never found. The hash lives as long as any of
its files may. A file is in the index before its content is on the storage, so that no crash leaves content
behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import redis.asyncio as redis

from contracts.batch import FileRecord, tenant_digest

from .redis_errors import reachable

#: Longest lifetime of a file, seconds.
MAX_LIFE_SECONDS: Final = 30 * 86_400
_EXPIRING: Final = "hr:files:expiring"
_SLACK_SECONDS: Final = 2 * 86_400


@dataclass(frozen=True, slots=True)
class ExpiredFile:
    """A file whose time is over.

    Attributes:
        record: None for one whose upload never came to its end.
    """

    tenant_digest: str
    file_id: str
    record: FileRecord | None


class Files:
    """The files of all tenants. Methods raise ``StreamsUnavailable`` when Redis cannot be reached."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis: Any = client  # redis-py types replies for every protocol version at once

    async def begin(self, tenant: str, file_id: str, until_ms: int) -> None:
        """Content will be written under this id; unless it is added until then, it is removed again."""
        async with reachable():
            await self._redis.zadd(_EXPIRING, {_member(tenant_digest(tenant), file_id): until_ms})

    async def add(self, record: FileRecord) -> None:
        """Make a file known once its content is whole, in the place of one with its id."""
        digest = tenant_digest(record.tenant)
        key = _key(digest)
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            pipe.execute_command("ZADD", _EXPIRING, record.expires_ms, _member(digest, record.id))
            pipe.execute_command("HSET", key, record.id, record.model_dump_json())
            pipe.expire(key, MAX_LIFE_SECONDS + _SLACK_SECONDS)
            await pipe.execute()

    async def get(self, tenant: str, file_id: str) -> FileRecord | None:
        """A file of this tenant; expired ones too, until they are removed."""
        return await self._read(tenant_digest(tenant), file_id)

    async def all(self, tenant: str) -> list[FileRecord]:
        """All files of a tenant, the oldest first."""
        async with reachable():
            raw = await self._redis.hvals(_key(tenant_digest(tenant)))
        found = [FileRecord.model_validate_json(one) for one in raw]
        return sorted(found, key=lambda record: (record.created_ms, record.id))

    async def forget(self, digest: str, file_id: str) -> None:
        """It is there no longer. Remove its content first.

        Args:
            digest: of its tenant.
        """
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            pipe.hdel(_key(digest), file_id)
            pipe.execute_command("ZREM", _EXPIRING, _member(digest, file_id))
            await pipe.execute()

    async def expired(self, now_ms: int, limit: int) -> list[ExpiredFile]:
        """Up to ``limit`` files whose time is over, the oldest first."""
        async with reachable():
            members = await self._redis.zrangebyscore(_EXPIRING, "-inf", now_ms, start=0, num=limit)
        pairs = [member.decode().partition(":") for member in members]
        return [ExpiredFile(digest, id_, await self._read(digest, id_)) for digest, _, id_ in pairs]

    async def postpone(self, file: ExpiredFile, until_ms: int) -> None:
        """Look at it again later."""
        async with reachable():
            await self._redis.zadd(_EXPIRING, {_member(file.tenant_digest, file.file_id): until_ms})

    async def use(self, file_id: str, batch_id: str, seconds: int) -> None:
        """A batch reads this file, for so long at most."""
        key = _used_key(file_id)
        async with reachable(), self._redis.pipeline(transaction=True) as pipe:
            pipe.sadd(key, batch_id)
            pipe.expire(key, seconds)
            await pipe.execute()

    async def release(self, file_id: str, batch_id: str) -> None:
        """The batch reads it no longer."""
        async with reachable():
            await self._redis.srem(_used_key(file_id), batch_id)

    async def is_used(self, file_id: str) -> bool:
        """Whether an open batch reads it."""
        async with reachable():
            return bool(await self._redis.exists(_used_key(file_id)))

    async def _read(self, digest: str, file_id: str) -> FileRecord | None:
        async with reachable():
            raw = await self._redis.hget(_key(digest), file_id)
        return None if raw is None else FileRecord.model_validate_json(raw)


def _key(digest: str) -> str:
    return f"hr:{{{digest}}}:files"


def _used_key(file_id: str) -> str:
    return f"hr:{{{file_id}}}:used"


def _member(digest: str, file_id: str) -> str:
    return f"{digest}:{file_id}"
