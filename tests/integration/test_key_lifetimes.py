"""Nothing of a request stays in Redis for ever, whatever became of it (H7)."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from contracts.entries import Accepted, Started, Terminal, Text
from contracts.identity import make_request_id
from contracts.stream_ids import StreamId
from contracts.tiers import FinishReason, Status
from contracts.token_stream import Appended
from infra.kafka import Publisher
from infra.open_requests_redis import OPEN_KEY, OpenRequests
from infra.settings import KafkaSettings, RedisSettings, StreamSettings
from infra.stream_redis import RedisTokenStreams, connect, stream_key
from stages.reaping import Reaper
from tests.integration.worker_bench import eventually, now_ms

GENERATIONS = 10_000
CHUNK = 500
AT_ONCE = 25
DONE = Terminal(status=Status.COMPLETED, finish_reasons=[FinishReason.STOP])


async def test_ten_thousand_generations_half_of_them_never_ended_leave_no_key_H7(
    redis_url: str,
) -> None:
    client: Any = connect(RedisSettings(url=redis_url))
    # Shorter than the configuration allows.
    lifetimes = StreamSettings.model_construct(
        lease_ms=500, open_ttl_seconds=3, retention_seconds=1, memory_seconds=1
    )
    streams = RedisTokenStreams(client, lifetimes)
    await client.flushdb()
    index = OpenRequests(client, "t")
    reaper = Reaper(index, streams, Publisher(KafkaSettings()), "outcomes", list, 1.0, now_ms)
    started = Started(worker_id="w", model_revision="1")
    for _ in range(GENERATIONS // CHUNK):
        ids = [make_request_id(now_ms(), secrets.token_bytes(10)) for _ in range(CHUNK)]
        accepted = Accepted(tenant="t", tier="paid", model="m", created_ms=now_ms())
        for first in range(0, CHUNK, AT_ONCE):
            await asyncio.gather(*(streams.create(r, accepted) for r in ids[first : first + AT_ONCE]))
        for entry_id, entry in ((StreamId(1, 0), started), (StreamId(1, 1), Text("a", (1,)))):
            results = await streams.append([(rid, entry_id, entry) for rid in ids])
            assert set(results) == {Appended.OK}
        await streams.renew_leases(ids, "w")
        await streams.seal_many([(rid, DONE) for rid in ids[::2]])
        assert 0 < await client.pttl(stream_key(ids[1])) <= 1_000 * lifetimes.open_ttl_seconds
    assert await client.zcard(OPEN_KEY) == GENERATIONS / 2

    async def only_the_index() -> bool:
        return await client.dbsize() == 1

    async def nothing() -> bool:
        await reaper._round()
        return await client.dbsize() == 0

    await eventually(only_the_index, "streams, owners and leases are gone by themselves", 20)
    await eventually(nothing, "the reaper has cleared the index", 20)
    await client.aclose()
