"""The KV tier's settings, and the Redis that a stack runs for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from infra.embedded import LOOPBACK, free_port, redis_answers, running
from infra.settings import KvSettings, Settings, SettingsError, development, parse
from infra.stack.configure import Addresses, UpOptions, effective_settings
from infra.stack.policy import CACHE, DRAIN_PHASES
from infra.stack.ports import PortKeeper
from infra.stack.units import cache_unit
from infra.stack.up import _addresses

CACHE_URL = "redis://127.0.0.1:7/0"
OWN_URL = "redis://user:secret@cache.internal:6379/0"


def with_kv(**kv: Any) -> Settings:
    return parse(development("sim").model_dump(mode="json") | {"kv": kv})


def test_only_vllm_has_a_tier_by_itself() -> None:
    assert development("vllm").kv.enabled
    assert not development("sim").kv.enabled
    assert not KvSettings().enabled


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chunk_tokens", 15),
        ("chunk_tokens", 8_193),
        ("ttl_seconds", 0),
        ("encoding", "int4"),
        ("connections", 0),
        ("connections", 65),
        ("lookup_ms", 0),
        ("load_seconds", 0),
        ("save_seconds", -1),
        ("save_queue_mib", 0),
        ("memory_mib", 15),
        ("shared_prompts", ["You are kind."]),
        ("redis", OWN_URL),
    ],
)
def test_a_value_that_makes_no_sense_is_an_error_that_names_its_key(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"kv\.{key}"):
        with_kv(**{key: value})


def test_settings_are_read_back_as_they_were_written() -> None:
    settings = with_kv(enabled=True, redis_url=OWN_URL, shared_prompts={"kind": "You are kind."})
    assert parse(settings.model_dump(mode="json")) == settings
    assert KvSettings.model_validate_json(settings.kv.model_dump_json()) == settings.kv


def _where(cache: str | None) -> Addresses:
    return Addresses(8100, 8101, "127.0.0.1:9", "redis://127.0.0.1:8/0", Path("/doorbells"), cache)


def test_workers_are_told_where_the_stack_s_cache_is() -> None:
    base = with_kv(enabled=True, memory_mib=64)
    settings = effective_settings(base, _where(CACHE_URL), UpOptions(Path("data")))
    assert settings.kv == base.kv.model_copy(update={"redis_url": CACHE_URL})
    assert settings.redis.url != settings.kv.redis_url


def test_a_cache_of_one_s_own_stays() -> None:
    base = with_kv(enabled=True, redis_url=OWN_URL)
    assert effective_settings(base, _where(None), UpOptions(Path("data"))).kv == base.kv


@pytest.mark.parametrize(
    ("engine", "kv", "runs"),
    [
        ("vllm", {"enabled": True}, True),
        ("vllm", {"enabled": True, "redis_url": OWN_URL}, False),
        ("vllm", {"enabled": False}, False),
        ("sim", {"enabled": True}, False),
    ],
)
def test_a_stack_runs_a_cache_where_one_is_needed(
    engine: str, kv: dict[str, Any], runs: bool, tmp_path: Path
) -> None:
    settings = with_kv(**kv)
    worker = settings.worker.model_copy(update={"engine": engine})
    settings = settings.model_copy(update={"worker": worker})
    keeper = PortKeeper()
    try:
        addresses = _addresses(UpOptions(tmp_path), settings, keeper, tmp_path)
    finally:
        keeper.release()
    assert (addresses.cache is not None) == runs
    assert addresses.cache != addresses.redis


async def test_the_stack_s_cache_evicts_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    unit = cache_unit(free_port(), memory_mib=16)
    port = unit.pick_port()
    assert (unit.name, unit.kind, unit.listener) == (CACHE, "service", None)
    assert await unit.probe(port) == "does not answer"

    with (
        running(unit.command(port), lambda: redis_answers(LOOPBACK, port), tmp_path / "log"),
        Redis(port=port) as found,
    ):
        client: Any = found
        assert await unit.probe(port) is None
        for i in range(30):
            client.set(f"k{i}", bytes(1_000_000))
        assert 0 < client.dbsize() < 20
        assert client.info("memory")["used_memory"] < 17 * 1024 * 1024
        assert client.info("persistence")["aof_enabled"] == 0
    assert await unit.probe(port) == "does not answer"
    assert os.listdir() == ["log"]


def test_the_cache_goes_when_nobody_needs_it_any_more() -> None:
    phase = {name: at for at, (names, _) in enumerate(DRAIN_PHASES) for name in names}
    assert phase["worker"] < phase[CACHE]
