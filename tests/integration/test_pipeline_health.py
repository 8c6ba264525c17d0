from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import redis.asyncio as redis

from contracts.worker_events import WorkerEvent
from infra.pipeline_health import DEPTH_KEY, pipeline_not_ready
from infra.settings import RedisSettings, Settings
from infra.stack.state import STACK_FILE_VARIABLE, ProcessState, StackState
from infra.stream_redis import connect
from infra.worker_feed_redis import WorkerFeed


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.Redis]:
    made = connect(RedisSettings(url=redis_url))
    yield made
    await made.aclose()


async def _heartbeat(client: redis.Redis, *, accepting: bool = True) -> None:
    event = WorkerEvent(worker_id="w", slot=0, sent_ms=0, max_seqs=1, running=0, accepting=accepting)
    await WorkerFeed(client, "default").publish(event)


async def test_it_names_what_is_missing_until_all_is_there(
    client: redis.Redis, settings: Callable[..., Settings]
) -> None:
    assert await pipeline_not_ready(client, settings()) == "no scheduler is running"
    await client.hset(DEPTH_KEY, "interactive", "0")  # type: ignore[misc]
    assert await pipeline_not_ready(client, settings()) == "no worker of pool default takes work"
    await _heartbeat(client)
    assert await pipeline_not_ready(client, settings()) is None


async def test_a_draining_worker_is_none(client: redis.Redis, settings: Callable[..., Settings]) -> None:
    await client.hset(DEPTH_KEY, "interactive", "0")  # type: ignore[misc]
    await _heartbeat(client, accepting=False)
    assert await pipeline_not_ready(client, settings()) == "no worker of pool default takes work"


async def test_an_old_heartbeat_is_none(client: redis.Redis, settings: Callable[..., Settings]) -> None:
    await client.hset(DEPTH_KEY, "interactive", "0")  # type: ignore[misc]
    event = WorkerEvent(worker_id="w", slot=0, sent_ms=0, max_seqs=1, running=0)
    await client.xadd("hr:pool:{default}:events", {"j": event.model_dump_json()}, id="1000-0")
    assert await pipeline_not_ready(client, settings()) == "no worker of pool default takes work"


async def test_a_redis_that_is_away_is_an_answer(settings: Callable[..., Settings]) -> None:
    away = connect(RedisSettings(url="redis://127.0.0.1:1/0"))
    reason = await pipeline_not_ready(away, settings())
    await away.aclose()
    assert reason is not None
    assert reason.startswith("Redis: ")


async def test_under_a_supervisor_its_view_of_the_other_roles_counts(
    client: redis.Redis,
    settings: Callable[..., Settings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await client.hset(DEPTH_KEY, "interactive", "0")  # type: ignore[misc]
    await _heartbeat(client)
    file = tmp_path / "stack.json"
    monkeypatch.setenv(STACK_FILE_VARIABLE, str(file))
    assert await pipeline_not_ready(client, settings()) == "the stack is starting"
    roles = [
        ProcessState(name=name, index=0, kind="role", ready=True)
        for name in ("moderation", "scheduler", "worker", "edge")
    ]
    state = StackState(url="u", ws_url="w", pid=1, engine="sim", kafka="k", redis="r", roles=roles)
    roles[0].ready = False
    file.write_text(state.model_dump_json())
    assert await pipeline_not_ready(client, settings()) == "moderation is not ready"
    state.roles[0].ready = True
    file.write_text(state.model_dump_json())
    assert await pipeline_not_ready(client, settings()) is None
