"""Cancelled Redis calls never leave their answers to the next user of a connection (H1, H2)."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from contracts.entries import Accepted, StreamEntry, Terminal, Text
from contracts.identity import make_request_id
from contracts.stream_ids import START, StreamId
from contracts.tiers import Status
from contracts.token_stream import StreamsUnavailable
from infra.presence_redis import ReaderPresence
from infra.settings import RedisSettings, StreamSettings
from infra.stream_redis import RedisTokenStreams, connect, stream_key
from streaming_edge.hub import Hub
from tests.tcp_proxy import TcpProxy, tcp_proxy

pytestmark = pytest.mark.timeout(60)

TENANTS = 50
CALLS = 40
READERS = 1_000


class Shared:
    """What a process shares between its tenants: one pool, one hub."""

    def __init__(self, url: str) -> None:
        settings = RedisSettings(url=url, max_connections=8 * TENANTS)
        self.client: Any = connect(settings)
        self.reader_client = connect(settings, blocking=True)
        self.streams = RedisTokenStreams(self.client, StreamSettings())
        self.hub = Hub(self.streams, self.reader_client, 512, ReaderPresence(self.client))


@asynccontextmanager
async def shared(redis_server: str) -> AsyncIterator[tuple[Shared, TcpProxy]]:
    async with tcp_proxy(int(redis_server.rpartition(":")[2])) as proxy:
        made = Shared(proxy.url)
        await made.hub.start()
        try:
            yield made, proxy
        finally:
            await made.hub.stop()
            await made.reader_client.aclose()
            await made.client.aclose()


class Tenant:
    """One tenant's request, in which every word is its own marker."""

    def __init__(self, shared: Shared, number: int) -> None:
        self.shared = shared
        self.name = f"tenant-{number}"
        self.marker = f"<{number}:{secrets.token_hex(4)}>"
        self.rid = make_request_id(number + 1, secrets.token_bytes(10))
        self.random = random.Random(number)
        self.tokens = 0
        self.heard = 0

    async def create(self) -> None:
        accepted = Accepted(tenant=self.name, tier="paid", model=self.marker, created_ms=1)
        await self.shared.streams.create(self.rid, accepted)

    async def write(self) -> None:
        self.tokens += 2
        pair = [(self.rid, StreamId(1, n), Text(self.marker, (n,))) for n in self.next_two()]
        await self.shared.streams.append(pair)

    def next_two(self) -> tuple[int, int]:
        return self.tokens - 1, self.tokens

    async def read(self) -> None:
        self.check(await self.shared.streams.read(self.rid, START, 100))

    async def own(self) -> None:
        owner = await self.shared.streams.owner(self.rid)
        assert owner is not None
        assert owner.tenant == self.name

    async def script(self) -> None:
        said = await self.shared.client.eval("return {ARGV[1], KEYS[1]}", 1, self.rid, self.marker)
        assert said == [self.marker.encode(), self.rid.encode()]

    async def block(self) -> None:
        raw = await self.shared.client.xread({stream_key(self.rid): "0-0"}, count=1, block=100)
        assert [key.decode() for key, _ in raw] == [stream_key(self.rid)]

    async def hub(self) -> None:
        async with self.shared.hub.subscribe(self.rid, START) as subscription:
            self.check(await subscription.next(1.0))

    def check(self, entries: list[StreamEntry]) -> None:
        for item in entries:
            if isinstance(item.entry, Text):
                assert item.entry.text == self.marker
            elif isinstance(item.entry, Accepted):
                assert (item.entry.tenant, item.entry.model) == (self.name, self.marker)
        self.heard += len(entries)

    async def run(self) -> None:
        kinds: list[Callable[[], Awaitable[None]]] = [
            self.write, self.read, self.own, self.script, self.block, self.hub,
        ]  # fmt: skip
        for _ in range(CALLS):
            task = asyncio.ensure_future(self.random.choice(kinds)())
            await asyncio.sleep(self.random.uniform(0, 0.005))
            task.cancel()
            for outcome in await asyncio.gather(task, return_exceptions=True):
                if not isinstance(outcome, asyncio.CancelledError | StreamsUnavailable | None):
                    raise outcome
            if self.random.random() < 0.1:
                await self.random.choice(kinds)()
        for kind in kinds:
            await kind()


async def test_h1_no_tenant_ever_gets_anothers_answer_from_cancelled_calls(redis_server: str) -> None:
    async with shared(redis_server) as (made, proxy):
        tenants = [Tenant(made, n) for n in range(TENANTS)]
        await asyncio.gather(*(tenant.create() for tenant in tenants))
        proxy.delay_seconds = 0.1
        async with asyncio.timeout(50):
            await asyncio.gather(*(tenant.run() for tenant in tenants))
        proxy.delay_seconds = 0.0
        assert all(tenant.heard for tenant in tenants)
        seals = [made.streams.seal(t.rid, Terminal(status=Status.CANCELLED)) for t in tenants]
        await asyncio.gather(*seals)


async def test_h2_readers_that_leave_in_quiet_phases_leave_nothing_behind(redis_server: str) -> None:
    """A thousand readings of a quiet stream, each cancelled while it waits, then ordinary commands."""
    async with shared(redis_server) as (made, proxy):
        tenant = Tenant(made, 1)
        await tenant.create()

        async def come_and_go() -> None:
            async with made.hub.subscribe(tenant.rid, StreamId(0, 1)) as subscription:
                await subscription.next(30.0)

        for _ in range(READERS // 50):
            tasks = [asyncio.ensure_future(come_and_go()) for _ in range(50)]
            await asyncio.sleep(0.005)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert proxy.made <= 8, "readers share connections"
        async with asyncio.timeout(5):
            for call in (tenant.own, tenant.write, tenant.read, tenant.script, tenant.hub):
                await call()
