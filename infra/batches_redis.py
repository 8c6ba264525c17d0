"""Batches in Redis: their records, who runs which, and which are open.

    hr:{<batch id>}:batch           JSON of a contracts.batch.BatchRecord
    hr:{<batch id>}:runner          the runner that has it in hand; a lock with a short lifetime
    hr:{<tenant digest>}:batches    ids of a tenant's batches, scored with their creation (Unix ms)
    hr:batches:open                 <tenant digest>:<batch id> of those that are not over, scored likewise

A record is changed in one transaction, and by a runner only as long as it has the batch in hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import redis.asyncio as redis
from redis.asyncio.lock import Lock
from redis.exceptions import LockError, WatchError

from contracts.batch import BatchRecord, tenant_digest
from contracts.token_stream import StreamsUnavailable

from .redis_errors import reachable
from .settings import BatchSettings

_OPEN: Final = "hr:batches:open"
#: A change that meets another one so often is given up; each try is a round trip.
_TRIES: Final = 50


class LeaseLost(Exception):
    """The runner no longer has the batch in hand: another one may have."""


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch that is not over."""

    batch_id: str
    tenant_digest: str


class Lease:
    """A runner's hold on a batch. Methods raise :class:`LeaseLost`, and ``StreamsUnavailable``."""

    def __init__(self, lock: Lock, holder: str) -> None:
        self._lock = lock
        self.holder = holder

    async def renew(self) -> None:
        """Keep it for another lifetime."""
        async with reachable():
            try:
                await self._lock.reacquire()
            except LockError:
                raise LeaseLost from None

    async def give_up(self) -> None:
        """Let others have it at once."""
        async with reachable():
            try:
                await self._lock.release()
            except LockError:
                raise LeaseLost from None


class Batches:
    """The batches of all tenants. Methods raise ``StreamsUnavailable`` when Redis cannot be reached."""

    def __init__(self, client: redis.Redis, settings: BatchSettings) -> None:
        self._redis: Any = client  # redis-py types replies for every protocol version at once
        self._retention_seconds = settings.retention_seconds
        self._lease_seconds = settings.lease_seconds

    async def create(self, record: BatchRecord) -> BatchRecord:
        """Keep a new batch, and let runners find it; returns the one with this id, which may be older."""
        digest = tenant_digest(record.tenant)
        index = _index_key(digest)
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            # Never in the place of one that has gone on since: the client sends lost calls again.
            pipe.set(_key(record.id), record.model_dump_json(), ex=self._life_seconds(record), nx=True)
            pipe.execute_command("ZADD", index, record.created_ms, record.id)
            forgotten_ms = record.created_ms - 1000 * self._life_seconds(record)
            pipe.execute_command("ZREMRANGEBYSCORE", index, "-inf", forgotten_ms)
            pipe.expire(index, self._life_seconds(record))
            pipe.execute_command("ZADD", _OPEN, record.created_ms, f"{digest}:{record.id}")
            pipe.get(_key(record.id))
            results = await pipe.execute()
        return BatchRecord.model_validate_json(results[-1])

    async def get(self, batch_id: str) -> BatchRecord | None:
        """A batch, whoever it belongs to."""
        async with reachable():
            raw = await self._redis.get(_key(batch_id))
        return None if raw is None else BatchRecord.model_validate_json(raw)

    async def count(self, tenant: str) -> int:
        """How many batches of a tenant are kept."""
        async with reachable():
            return int(await self._redis.zcard(_index_key(tenant_digest(tenant))))

    async def page(self, tenant: str, after: BatchRecord | None, limit: int) -> list[BatchRecord]:
        """Batches of a tenant, the newest first, after one of them; ones that are forgotten are left out."""
        index = _index_key(tenant_digest(tenant))
        start = 0
        if after is not None:
            async with reachable():
                rank = await self._redis.zrevrank(index, after.id)
            start = 0 if rank is None else rank + 1
        found: list[BatchRecord] = []
        while len(found) < limit:
            async with reachable():
                ids = await self._redis.zrevrange(index, start, start + limit - 1)
                if not ids:
                    break
                async with self._redis.pipeline(transaction=False) as pipe:
                    for raw_id in ids:
                        pipe.get(_key(raw_id.decode()))
                    raws = await pipe.execute()
                gone = [i for i, raw in zip(ids, raws, strict=True) if raw is None]
                if gone:
                    await self._redis.zrem(index, *gone)
            found += [BatchRecord.model_validate_json(raw) for raw in raws if raw is not None]
            start += len(ids) - len(gone)
        return found[:limit]

    async def change(
        self,
        batch_id: str,
        decide: Callable[[BatchRecord], BatchRecord],
        lease: Lease | None = None,
    ) -> BatchRecord | None:
        """Replace a record by what ``decide`` makes of it, as one step; None where there is none.

        Args:
            decide: called again when somebody else was quicker.
            lease: the change is made only while it is held.

        Raises:
            LeaseLost: it is not.
        """
        key, runner = _key(batch_id), _runner_key(batch_id)
        for _ in range(_TRIES):
            async with reachable(), self._redis.pipeline(transaction=True) as pipe:
                await pipe.watch(key, runner)
                if lease is not None and await pipe.get(runner) != lease.holder.encode():
                    raise LeaseLost
                raw = await pipe.get(key)
                if raw is None:
                    return None
                before = BatchRecord.model_validate_json(raw)
                after = decide(before)
                if after == before:
                    return before
                pipe.multi()
                pipe.set(key, after.model_dump_json(), ex=self._life_seconds(after))
                try:
                    await pipe.execute()
                except WatchError:
                    continue
                return after
        raise StreamsUnavailable("a batch's record changes all the time")

    async def open_batches(self, limit: int) -> list[OpenBatch]:
        """Up to ``limit`` batches that are not over, the oldest first."""
        async with reachable():
            members = await self._redis.zrange(_OPEN, 0, limit - 1)
        pairs = [member.decode().partition(":") for member in members]
        return [OpenBatch(batch_id, digest) for digest, _, batch_id in pairs]

    async def claim(self, batch_id: str, holder: str) -> Lease | None:
        """Take a batch in hand; None where somebody has it."""
        lock = Lock(
            self._redis,
            _runner_key(batch_id),
            timeout=self._lease_seconds,
            blocking=False,
            thread_local=False,
        )
        async with reachable():
            taken = await lock.acquire(token=holder)
        return Lease(lock, holder) if taken else None

    async def close(self, batch: OpenBatch) -> None:
        """It is over, and nothing of it is left to do."""
        async with reachable():
            await self._redis.zrem(_OPEN, f"{batch.tenant_digest}:{batch.batch_id}")

    def _life_seconds(self, record: BatchRecord) -> int:
        return self._retention_seconds + record.window_ms // 1000


def _key(batch_id: str) -> str:
    return f"hr:{{{batch_id}}}:batch"


def _runner_key(batch_id: str) -> str:
    return f"hr:{{{batch_id}}}:runner"


def _index_key(digest: str) -> str:
    return f"hr:{{{digest}}}:batches"
