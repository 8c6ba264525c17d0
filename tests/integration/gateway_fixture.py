"""A gateway in this process on real Kafka and Redis, with the pipeline double behind it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import httpx
import redis.asyncio as redis
from anyio.from_thread import start_blocking_portal
from openai import AsyncOpenAI

from contracts.worker_events import WorkerEvent
from infra.pipeline_health import DEPTH_KEY
from infra.settings import DEV_PAID_KEY, Settings
from infra.stream_redis import RedisTokenStreams, connect
from infra.tasks import end_tasks
from infra.topics import ensure_topics
from infra.worker_feed_redis import WorkerFeed
from producers.role import GatewayRole
from tests.integration.pipeline_double import PipelineDouble


@dataclass
class Gateway:
    role: GatewayRole
    double: PipelineDouble
    streams: RedisTokenStreams
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.role.port}"

    def openai(self, api_key: str = DEV_PAID_KEY) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=20)


@asynccontextmanager
async def running_gateway(
    settings: Settings, listener: socket.socket | None = None
) -> AsyncIterator[Gateway]:
    await ensure_topics(settings)
    client = connect(settings.redis)
    streams = RedisTokenStreams(client, settings.streams)
    double = PipelineDouble(settings, streams)
    await double.start()
    presence = asyncio.create_task(_seem_alive(client, settings))
    role = GatewayRole(settings, listener=listener)
    try:
        await role.start()
        headers = {"Authorization": f"Bearer {DEV_PAID_KEY}"}
        url = f"http://127.0.0.1:{role.port}"
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=20) as http:
            yield Gateway(role, double, streams, http)
    finally:
        await role.stop()
        await end_tasks([presence])
        await double.stop()
        await client.aclose()


async def _seem_alive(client: redis.Redis, settings: Settings) -> None:
    """What a scheduler and a worker leave in Redis, which the gateway's readiness looks for."""
    feed = WorkerFeed(client, settings.pools[0])
    while True:
        event = WorkerEvent(
            worker_id="double", slot=0, sent_ms=int(time.time() * 1000), max_seqs=1, running=0
        )
        await feed.publish(event)
        await client.hset(DEPTH_KEY, mapping={"interactive": 0})  # type: ignore[misc]
        await asyncio.sleep(settings.scheduler.worker_timeout_ms / 4000)


@contextmanager
def gateway_in_a_thread(settings: Settings) -> Iterator[Gateway]:
    """For clients that block, or live in another process."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(running_gateway(settings)) as gateway,
    ):
        yield gateway


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)
