"""Roles and a Redis that is not fit for token streams: refused, warned about, noticed later, shown."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.redis_facts import RedisWatch, read_facts, require_fit
from infra.role import EXIT_CONFIGURATION
from infra.settings import RedisSettings, Settings, SettingsError
from infra.stream_redis import connect
from tests.integration.worker_bench import PROJECT, eventually
from tests.redis_servers import RedisServer, restartable
from tests.stack_process import StackProcess

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with restartable("valkey", tmp_path, {"maxmemory": "64mb"}) as found:
        yield found


async def configure(server: RedisServer, name: str, value: str) -> None:
    client: Any = connect(RedisSettings(url=server.url))
    await client.config_set(name, value)
    await client.aclose()


async def test_a_redis_says_what_it_is(server: RedisServer) -> None:
    facts = await read_facts(RedisSettings(url=server.url))
    assert (facts.policy, facts.maxmemory_bytes, facts.aof) == ("noeviction", 64 * 1024**2, True)
    assert facts.warning is None
    assert facts.used_bytes is not None
    assert 0 < facts.used_bytes < 64 * 1024**2


async def test_a_redis_that_may_not_be_asked_is_unknown(server: RedisServer) -> None:
    client: Any = connect(RedisSettings(url=server.url))
    await client.execute_command(
        "ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all", "-@dangerous"
    )
    await client.aclose()
    where = server.url.replace("redis://", "redis://app:secret@")
    facts = await read_facts(RedisSettings(url=where))
    assert facts.policy == "unknown"
    await require_fit(RedisSettings(url=where))


async def test_h8_an_evicting_redis_is_refused_unless_that_is_allowed(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    await configure(server, "maxmemory-policy", "allkeys-lru")
    with pytest.raises(SettingsError, match=r"redis\.allow_eviction"):
        await require_fit(RedisSettings(url=server.url))
    with caplog.at_level(logging.WARNING):
        await require_fit(RedisSettings(url=server.url, allow_eviction=True))
    assert "allkeys-lru" in caplog.records[-1].__dict__["warning"]


async def test_a_role_ends_with_one_clear_line_and_is_not_started_again(
    server: RedisServer, settings: Callable[..., Settings], tmp_path: Path
) -> None:
    await configure(server, "maxmemory-policy", "volatile-ttl")
    config = tmp_path / "config.json"
    config.write_text(settings(redis={"url": server.url}).model_dump_json())
    command = [sys.executable, "-m", "stages", "history", "--config", str(config)]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=PROJECT, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == EXIT_CONFIGURATION
    assert "volatile-ttl" in done.stderr.splitlines()[-1]
    assert "redis.allow_eviction" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


async def test_a_policy_that_changes_later_is_noticed(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    watch = asyncio.create_task(RedisWatch(RedisSettings(url=server.url), 0.05).run())

    def said(word: str) -> Callable[[], Any]:
        async def look() -> bool:
            return any(word in r.getMessage() for r in caplog.records)

        return look

    await asyncio.sleep(0)
    await eventually(_looked_once(server), "the watch has looked once")
    await configure(server, "maxmemory-policy", "allkeys-lfu")
    await eventually(said("not fit"), "a warning")
    await configure(server, "maxmemory-policy", "noeviction")
    await eventually(said("fit for token streams again"), "the all-clear")
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


def _looked_once(server: RedisServer) -> Callable[[], Any]:
    async def look() -> bool:
        client: Any = connect(RedisSettings(url=server.url))
        stats = await client.info("commandstats")
        await client.aclose()
        return bool(stats.get("cmdstat_info", {}).get("calls", 0) >= 2)

    return look


async def test_the_status_shows_the_redis(sim_stack: StackProcess) -> None:
    command = [sys.executable, "-m", "infra.cli", "status", "--data-dir", str(sim_stack.data_dir)]
    plain, as_json = [
        await asyncio.to_thread(
            subprocess.run, [*command, *more], cwd=PROJECT, capture_output=True, text=True, check=True
        )
        for more in ([], ["--json"])
    ]
    assert "redis: noeviction" in plain.stdout
    shown = json.loads(as_json.stdout)["redis"]
    assert (shown["policy"], shown["aof"], shown["warning"]) == ("noeviction", True, None)
