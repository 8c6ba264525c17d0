"""What schedulers say about overload, on real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis

from contracts.degraded import OverloadLevel, OverloadStep
from contracts.token_stream import StreamsUnavailable
from infra import overload_redis
from infra.overload_redis import OverloadBoard
from infra.settings import RedisSettings
from infra.stream_redis import connect

HIGH = OverloadLevel(OverloadStep.STANDARD_REFUSED, "slow")
LOW = OverloadLevel(OverloadStep.BATCH_PAUSED, "a little slow")
NORMAL = OverloadLevel()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.Redis]:
    made = connect(RedisSettings(url=redis_url))
    yield made
    await made.aclose()


async def test_the_worst_of_all_schedulers_holds_pool_by_pool(client: redis.Redis) -> None:
    board = OverloadBoard(client)
    assert await board.read() == {}
    await board.publish("a", {"x": HIGH, "y": NORMAL})
    await board.publish("b", {"x": LOW, "y": LOW})
    assert await board.read() == {"x": HIGH, "y": LOW}


async def test_a_schedulers_later_word_replaces_its_earlier_one(client: redis.Redis) -> None:
    board = OverloadBoard(client)
    await board.publish("a", {"x": HIGH})
    await board.publish("a", {"x": NORMAL})
    assert await board.read() == {}


async def test_a_scheduler_that_fell_silent_has_no_say(client: redis.Redis) -> None:
    board = OverloadBoard(client)
    seconds, _ = await client.time()
    long_ago = f"{seconds * 1000 - overload_redis.FRESH_MS - 1_000}-0"
    said = b'{"x":["interactive_refused","gone"]}'
    await client.xadd(overload_redis._KEY, {"s": "dead", "p": said}, id=long_ago)
    assert await board.read() == {}
    await board.publish("a", {"x": LOW})
    assert await board.read() == {"x": LOW}


async def test_it_stays_small_and_ends_by_itself(client: redis.Redis) -> None:
    board = OverloadBoard(client)
    for number in range(overload_redis._KEPT + 20):
        await board.publish(f"s{number}", {"x": LOW})
    assert await client.xlen(overload_redis._KEY) == overload_redis._KEPT
    assert 0 < await client.pttl(overload_redis._KEY) <= overload_redis._TTL_MS


async def test_a_redis_that_is_away_is_said_in_the_projects_words() -> None:
    away = connect(RedisSettings(url="redis://127.0.0.1:1/0", timeout_seconds=0.2))
    with pytest.raises(StreamsUnavailable):
        await OverloadBoard(away).read()
    await away.aclose()
