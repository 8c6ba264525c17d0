"""The feed of worker events, and the slots workers claim: one bounded Redis Stream a pool.

Keys: ``hr:pool:{<pool>}:events`` (stream) and ``hr:pool:{<pool>}:slot:<n>`` (claim, short-lived).
"""

from __future__ import annotations

from typing import Any

import redis.asyncio as redis

from contracts.worker_events import WorkerEvent

_EVENTS_KEPT = 5_000


def _events_key(pool: str) -> str:
    return f"hr:pool:{{{pool}}}:events"


def _slot_key(pool: str, slot: int) -> str:
    return f"hr:pool:{{{pool}}}:slot:{slot}"


class WorkerFeed:
    """Events of one pool's workers. Redis errors pass through: callers retry at their next interval."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        self._redis: Any = client  # redis-py types replies for every protocol version at once
        self._pool = pool

    async def publish(self, event: WorkerEvent) -> None:
        """Append an event (worker side)."""
        await self._redis.xadd(
            _events_key(self._pool),
            {"j": event.model_dump_json()},
            maxlen=_EVENTS_KEPT,
            approximate=True,
        )

    async def claim_slot(self, worker_id: str, slots: int, ttl_ms: int) -> int | None:
        """Claim the lowest free slot for ``ttl_ms``; None while all are taken."""
        for slot in range(slots):
            if await self._redis.set(_slot_key(self._pool, slot), worker_id, nx=True, px=ttl_ms):
                return slot
        return None

    async def keep_slot(self, worker_id: str, slot: int, ttl_ms: int) -> bool:
        """Renew a claim; False when it was lost to another worker (then stop reading the partition)."""
        key = _slot_key(self._pool, slot)
        holder = await self._redis.get(key)
        if holder is not None and holder.decode() != worker_id:
            return False
        # Not SET: a Redis whose memory is full refuses that, and a slot that runs out may be taken.
        if holder is not None and await self._redis.pexpire(key, ttl_ms):
            return True
        found = await self._redis.set(key, worker_id, nx=True, get=True, px=ttl_ms)
        return found is None or found.decode() == worker_id

    async def release_slot(self, worker_id: str, slot: int) -> None:
        """Give a claim back."""
        key = _slot_key(self._pool, slot)
        holder = await self._redis.get(key)
        if holder is not None and holder.decode() == worker_id:
            await self._redis.delete(key)

    async def recent(self, count: int = 500) -> tuple[str, list[WorkerEvent]]:
        """The last events, oldest first, and the position after them (for a scheduler that starts).

        They may be old: how old, their Redis ids tell only roughly, so a worker counts as alive only
        once it is heard again.
        """
        raw = await self._redis.xrevrange(_events_key(self._pool), count=count)
        last = raw[0][0].decode() if raw else "0-0"
        return last, [WorkerEvent.model_validate_json(f[b"j"]) for _, f in reversed(raw)]

    async def read(self, after: str, block_ms: int) -> tuple[str, list[WorkerEvent]]:
        """Events after a position, waiting up to ``block_ms`` for the first (scheduler side).

        Needs a client made with ``connect(..., blocking=True)``.
        """
        raw = await self._redis.xread({_events_key(self._pool): after}, count=500, block=block_ms)
        if not raw:
            return after, []
        entries = raw[0][1]
        return entries[-1][0].decode(), [
            WorkerEvent.model_validate_json(fields[b"j"]) for _, fields in entries
        ]
