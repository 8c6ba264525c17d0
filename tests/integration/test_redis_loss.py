"""A Redis that comes back without its last second, or as its promoted replica, under a running worker."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from contracts.entries import StreamEntry, Text
from contracts.reply import Reply
from contracts.stream_ids import START, StreamId
from contracts.tiers import Status
from infra.presence_redis import ReaderPresence
from infra.settings import Settings
from infra.stream_redis import RedisTokenStreams, connect, stream_key
from streaming_edge.errors import StreamLost
from streaming_edge.hub import Hub
from tests.integration.test_worker_process import expected_text
from tests.integration.worker_bench import WorkerBench, eventually, worker_bench
from tests.redis_servers import RedisServer, restartable
from tests.tcp_proxy import TcpProxy, tcp_proxy

pytestmark = pytest.mark.timeout(90)

TOKENS = 300


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with restartable("valkey", tmp_path) as found:
        yield found


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "replica"
    folder.mkdir()
    with restartable("valkey", folder) as found:
        yield found


def configured(settings: Callable[..., Settings], url: str, **sections: Any) -> Settings:
    sim = {"ttft_ms": 5, "tpot_ms": 10, "slowdown_per_request": 0}
    return settings(
        redis={"url": url, "timeout_seconds": 2},
        streams={"lease_ms": 600},
        worker={"engine": "sim", "max_seqs": 32, "heartbeat_ms": 100, "sim": sim},
        **sections,
    )


class Reader:
    """A reader on a hub of its own."""

    def __init__(self, settings: Settings) -> None:
        self.client = connect(settings.redis)
        self.reader_client = connect(settings.redis, blocking=True)
        self.streams = RedisTokenStreams(self.client, settings.streams)
        self.hub = Hub(self.streams, self.reader_client, 512, ReaderPresence(self.client))

    async def whole(self, rid: str, into: list[StreamEntry], after: StreamId = START) -> None:
        async with self.hub.subscribe(rid, after) as subscription:
            while not subscription.ended:
                into += await subscription.next(5.0)

    async def close(self) -> None:
        await self.hub.stop()
        await self.reader_client.aclose()
        await self.client.aclose()


@asynccontextmanager
async def reading(settings: Settings) -> AsyncIterator[Reader]:
    reader = Reader(settings)
    await reader.hub.start()
    try:
        yield reader
    finally:
        await reader.close()


def text_of(items: list[StreamEntry]) -> str:
    return "".join(item.entry.text for item in items if isinstance(item.entry, Text))


async def test_a_worker_writes_again_what_a_restarted_redis_has_lost(
    settings: Callable[..., Settings], server: RedisServer, tmp_path: Path
) -> None:
    """The append-only file of an earlier moment is what ``appendfsync everysec`` may leave."""
    made = configured(settings, server.url)
    async with worker_bench(made, tmp_path) as bench, reading(made) as reader:
        worker = await bench.start_worker()
        rid = await bench.accept()
        seen: list[StreamEntry] = []
        task = asyncio.create_task(reader.whole(rid, seen))
        await bench.dispatch(worker, bench.record(rid, "loss", max_tokens=TOKENS))
        await bench.tokens_out(rid, 40)
        shutil.copytree(server.data, tmp_path / "earlier")
        earlier = (await bench.reply(rid)).tokens_out
        await _read_up_to(seen, earlier + 30)
        server.kill()
        shutil.rmtree(server.data)
        shutil.copytree(tmp_path / "earlier", server.data)
        server.start()
        reply = await bench.sealed(rid, 30)
        async with asyncio.timeout(10):
            await task
        log = worker.log.read_text()
    assert "writing again what the store has lost" in log
    assert reply.gap is None
    assert reply.terminal is not None
    assert reply.terminal.status is Status.COMPLETED
    assert reply.choices[0].text == expected_text(bench, "loss", TOKENS)
    assert text_of(seen) == reply.choices[0].text, "the reader noticed nothing"


async def test_a_lost_end_without_its_worker_never_becomes_a_reply_with_a_seam(
    settings: Callable[..., Settings], server: RedisServer, tmp_path: Path
) -> None:
    """The worker dies with the loss, another goes on from what is there: who has read more is told."""
    made = configured(settings, server.url)
    async with worker_bench(made, tmp_path) as bench, reading(made) as reader:
        worker = await bench.start_worker()
        rid = await bench.accept()
        seen: list[StreamEntry] = []
        task = asyncio.create_task(reader.whole(rid, seen))
        await bench.dispatch(worker, bench.record(rid, "seam", max_tokens=TOKENS))
        await bench.tokens_out(rid, 40)
        shutil.copytree(server.data, tmp_path / "earlier")
        await _read_up_to(seen, (await bench.reply(rid)).tokens_out + 30)
        worker.process.kill()
        server.kill()
        shutil.rmtree(server.data)
        shutil.copytree(tmp_path / "earlier", server.data)
        server.start()
        other = await bench.start_worker()
        await bench.dispatch(other, bench.record(rid, "seam", attempt=2, max_tokens=TOKENS))
        with pytest.raises(StreamLost):
            async with asyncio.timeout(20):
                await task
        reply = await bench.sealed(rid, 30)
        late: list[StreamEntry] = []
        await reader.whole(rid, late)
    assert reply.gap is None
    assert reply.choices[0].text == expected_text(bench, "seam", TOKENS)
    assert text_of(late) == reply.choices[0].text


async def test_a_hole_in_a_stream_is_an_error_for_readers_and_takeover(
    settings: Callable[..., Settings], server: RedisServer, tmp_path: Path
) -> None:
    made = configured(settings, server.url)
    async with worker_bench(made, tmp_path) as bench, reading(made) as reader:
        worker = await bench.start_worker()
        rid = await bench.accept()
        await bench.dispatch(worker, bench.record(rid, "hole", max_tokens=2_000))
        await bench.tokens_out(rid, 20)
        worker.process.kill()
        await bench.client.xdel(stream_key(rid), "1-7")
        seen: list[StreamEntry] = []
        with pytest.raises(StreamLost):
            await reader.whole(rid, seen)
        assert seen[-1].id == StreamId(1, 6)

        async def lease_gone() -> bool:
            return await bench.streams.lease_holders([rid]) == [None]

        await eventually(lease_gone, "the lease has run out")
        other = await bench.start_worker()
        await bench.dispatch(other, bench.record(rid, "hole", attempt=2, max_tokens=2_000))
        reply = await bench.sealed(rid)
        outcome = (await bench.outcomes(rid))[rid]
    assert reply.terminal is not None
    assert reply.terminal.error is not None
    assert reply.terminal.error.code == "stream_lost"
    assert outcome.status is Status.FAILED


async def _read_up_to(seen: list[StreamEntry], tokens: int) -> None:
    async def far() -> bool:
        return bool(seen) and seen[-1].id.token >= tokens

    await eventually(far, f"{tokens} tokens read")


async def _promote(bench: WorkerBench, replica: RedisServer) -> None:
    promoted = connect(bench.settings.redis.model_copy(update={"url": replica.url}))
    await promoted.execute_command("REPLICAOF", "NO", "ONE")
    await promoted.aclose()


async def _follow(bench: WorkerBench, follower: RedisServer, leader: RedisServer) -> None:
    client: Any = connect(bench.settings.redis.model_copy(update={"url": follower.url}))
    await client.execute_command("REPLICAOF", "127.0.0.1", leader.port)

    async def linked() -> bool:
        return bool((await client.info("replication"))["master_link_status"] == "up")

    await eventually(linked, "the replica follows")
    await client.aclose()


async def _texts(bench: WorkerBench, rids: list[str], words: list[str]) -> None:
    for rid, word in zip(rids, words, strict=True):
        reply: Reply = await bench.sealed(rid, 30)
        assert reply.terminal is not None
        assert reply.terminal.status is Status.COMPLETED, reply.terminal
        assert reply.gap is None
        assert reply.choices[0].text == expected_text(bench, word, TOKENS)


async def test_replies_go_on_when_the_server_they_are_connected_to_is_demoted(
    settings: Callable[..., Settings], server: RedisServer, replica: RedisServer, tmp_path: Path
) -> None:
    """No connection breaks: the old server answers READONLY, the address points to the promoted one."""
    async with tcp_proxy(server.port) as proxy:
        made = configured(settings, proxy.url)
        async with worker_bench(made, tmp_path) as bench, reading(made) as reader:
            await _follow(bench, replica, server)
            worker = await bench.start_worker()
            words = [f"demoted {n}" for n in range(4)]
            rids = [await bench.accept() for _ in words]
            seen: list[list[StreamEntry]] = [[] for _ in rids]
            tasks = [asyncio.create_task(reader.whole(r, s)) for r, s in zip(rids, seen, strict=True)]
            for rid, word in zip(rids, words, strict=True):
                await bench.dispatch(worker, bench.record(rid, word, max_tokens=TOKENS))
            for some in seen:
                await _read_up_to(some, 50)
            await _demote(proxy, bench, server, replica)
            new = await bench.accept()
            await bench.dispatch(worker, bench.record(new, "new", max_tokens=TOKENS))
            await _texts(bench, [*rids, new], [*words, "new"])
            async with asyncio.timeout(10):
                await asyncio.gather(*tasks)
            assert worker.process.poll() is None
    for some, word in zip(seen, words, strict=True):
        assert text_of(some) == expected_text(bench, word, TOKENS)


async def _demote(
    proxy: TcpProxy, bench: WorkerBench, server: RedisServer, replica: RedisServer
) -> None:
    await _promote(bench, replica)
    proxy.target = replica.port
    old = connect(bench.settings.redis.model_copy(update={"url": server.url}))
    await old.execute_command("REPLICAOF", "127.0.0.1", str(replica.port))
    await old.aclose()
