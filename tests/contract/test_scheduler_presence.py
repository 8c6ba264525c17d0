"""Schedulers that tell the workers of a pool that they live, on real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis

from infra.scheduler_presence_redis import SchedulerPresence
from tests.integration.worker_bench import eventually

LONG_MS = 60_000


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.Redis]:
    found = redis.Redis.from_url(redis_url)
    yield found
    await found.aclose()


async def test_the_latest_word_of_each_counts(client: redis.Redis) -> None:
    presence = SchedulerPresence(client, "p", LONG_MS)
    assert await presence.read() == {}
    for backlog in (5, 7):
        await presence.announce("a", backlog)
        await presence.announce("b", 0)
        assert await presence.read() == {"a": backlog, "b": 0}


async def test_who_leaves_is_gone_at_once_and_may_come_back(client: redis.Redis) -> None:
    presence = SchedulerPresence(client, "p", LONG_MS)
    await presence.announce("a", 1)
    await presence.announce("b", 1)
    await presence.leave("a")
    assert await presence.read() == {"a": None, "b": 1}
    await presence.announce("a", 2)
    assert await presence.read() == {"a": 2, "b": 1}


async def test_who_falls_silent_is_gone_after_a_while_though_others_speak(client: redis.Redis) -> None:
    presence = SchedulerPresence(client, "p", 150)
    await presence.announce("silent", 1)

    async def alone() -> bool:
        await presence.announce("a", 1)
        return await presence.read() == {"a": 1}

    assert (await presence.read()).keys() == {"silent"}
    await eventually(alone, "the silent one is forgotten")


async def test_pools_are_apart_and_nothing_is_kept_for_long(client: redis.Redis) -> None:
    presence = SchedulerPresence(client, "p", 150)
    for number in range(200):
        await presence.announce("a", number)
    assert await SchedulerPresence(client, "q", LONG_MS).read() == {}
    (key,) = await client.keys("*")
    assert await client.xlen(key) < 100

    async def empty() -> bool:
        return await client.keys("*") == []

    await eventually(empty, "the key has run out")
