"""A gateway in this process on real Kafka and Redis, with the pipeline double behind it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from openai import AsyncOpenAI

from infra.settings import DEV_PAID_KEY, Settings
from infra.stream_redis import RedisTokenStreams, connect
from infra.topics import ensure_topics
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
async def running_gateway(settings: Settings) -> AsyncIterator[Gateway]:
    await ensure_topics(settings)
    client = connect(settings.redis)
    streams = RedisTokenStreams(client, settings.streams)
    double = PipelineDouble(settings, streams)
    await double.start()
    role = GatewayRole(settings)
    try:
        await role.start()
        headers = {"Authorization": f"Bearer {DEV_PAID_KEY}"}
        url = f"http://127.0.0.1:{role.port}"
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=20) as http:
            yield Gateway(role, double, streams, http)
    finally:
        await role.stop()
        await double.stop()
        await client.aclose()


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)
