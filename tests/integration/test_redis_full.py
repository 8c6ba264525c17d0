"""A Redis whose memory is full (H8): replies wait and go on, or end clearly; nothing hangs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError

from contracts.entries import Accepted, Terminal
from contracts.identity import make_request_id
from contracts.stream_ids import START
from contracts.tiers import Status
from contracts.token_stream import Appended, StreamsFull
from infra.settings import Settings
from infra.stream_redis import RedisTokenStreams, connect, stream_key
from infra.tasks import end_tasks
from tests.integration.test_worker_process import expected_text
from tests.integration.worker_bench import worker_bench
from tests.redis_servers import SERVERS, RedisServer, restartable

pytestmark = pytest.mark.timeout(90)

MAXMEMORY = "12mb"
_BLOCK = 64 * 1024


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    with restartable(request.param, tmp_path, {"maxmemory": MAXMEMORY}) as found:
        yield found


async def fill(client: Any) -> None:
    """Ballast until Redis takes no more, also not of the smallest things."""
    for size in (_BLOCK, 4 * 1024, 16):
        try:
            while True:
                await client.set(f"ballast:{secrets.token_hex(8)}", b"x" * size)
        except OutOfMemoryError:
            continue


async def free(client: Any) -> None:
    names = [name async for name in client.scan_iter("ballast:*", count=1_000)]
    await client.delete(*names)


@asynccontextmanager
async def full(client: Any) -> AsyncIterator[None]:
    """Full for the length of a block: what becomes free meanwhile is filled again."""

    async def keep_full() -> None:
        while True:
            await asyncio.sleep(0.02)
            await fill(client)

    await fill(client)
    keeping = asyncio.create_task(keep_full())
    try:
        yield
    finally:
        await end_tasks([keeping])
        await free(client)


@pytest.fixture
def made(settings: Callable[..., Settings], server: RedisServer) -> Settings:
    return settings(
        redis={"url": server.url, "timeout_seconds": 2},
        streams={"lease_ms": 600},
        worker={
            "engine": "sim",
            "max_seqs": 32,
            "heartbeat_ms": 100,
            "sim": {"ttft_ms": 5, "tpot_ms": 10, "slowdown_per_request": 0},
        },
    )


async def test_h8_a_full_redis_refuses_new_streams_and_still_takes_seals(made: Settings) -> None:
    client: Any = connect(made.redis)
    streams = RedisTokenStreams(client, made.streams)
    accepted = Accepted(tenant="t", tier="paid", model="m", created_ms=1)
    old, new = (make_request_id(1, secrets.token_bytes(10)) for _ in range(2))
    await streams.create(old, accepted)
    await streams.renew_leases([old], "w")
    async with full(client):
        with pytest.raises(StreamsFull):
            await streams.create(new, accepted)
        assert not await client.exists(stream_key(new)), "nothing of it remains"
        await client.pexpire(f"hr:{{{old}}}:lease", 50)
        await streams.renew_leases([old], "w")
        assert await client.pttl(f"hr:{{{old}}}:lease") > 100
        assert len(await streams.read(old, START, 10)) == 1
        assert await streams.seal(old, Terminal(status=Status.CANCELLED)) is Appended.OK
        assert await streams.seal(old, Terminal(status=Status.FAILED)) is Appended.SEALED
        assert 0 < await client.ttl(stream_key(old)) <= made.streams.retention_seconds
    await client.aclose()


async def test_h8_replies_go_on_when_memory_returns(made: Settings, tmp_path: Path) -> None:
    async with worker_bench(made, tmp_path) as bench:
        worker = await bench.start_worker()
        rids = [await bench.accept() for _ in range(4)]
        for n, rid in enumerate(rids):
            await bench.dispatch(worker, bench.record(rid, f"full {n}", max_tokens=150))
        for rid in rids:
            await bench.tokens_out(rid, 10)
        async with full(bench.client):
            before = [(await bench.reply(rid)).tokens_out for rid in rids]
            assert all(found < 150 for found in before)
        for n, rid in enumerate(rids):
            reply = await bench.sealed(rid, 20)
            assert reply.gap is None
            assert reply.terminal is not None
            assert reply.terminal.status is Status.COMPLETED
            assert reply.choices[0].text == expected_text(bench, f"full {n}", 150)
        assert worker.process.poll() is None


async def test_h8_a_redis_that_stays_full_ends_replies_with_a_clear_error(
    made: Settings, tmp_path: Path
) -> None:
    async with worker_bench(made, tmp_path) as bench:
        worker = await bench.start_worker()
        rids = [await bench.accept() for _ in range(4)]
        for n, rid in enumerate(rids):
            await bench.dispatch(worker, bench.record(rid, f"stays {n}", max_tokens=5_000))
        for rid in rids:
            await bench.tokens_out(rid, 10)
        async with full(bench.client):
            for rid in rids:
                reply = await bench.sealed(rid, 20)
                assert reply.terminal is not None
                assert reply.terminal.status is Status.FAILED
                assert reply.terminal.error is not None
                assert reply.terminal.error.code == "request_lost"
        outcomes = await bench.outcomes(*rids)
        assert {o.status for o in outcomes.values()} == {Status.FAILED}
        after = await bench.generate(worker, "after", max_tokens=20)
        assert after.choices[0].text == expected_text(bench, "after", 20)
