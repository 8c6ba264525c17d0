"""A stack of two pools with a model each: requests reach their pool, and overload moves free ones over."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiokafka import AIOKafkaConsumer
from websockets.asyncio.client import connect

from contracts.entries import Started
from contracts.records import OutcomeRecord, decode
from infra.settings import Settings, development, load
from infra.stream_redis import RedisTokenStreams
from infra.stream_redis import connect as connect_redis
from tests.stack_process import FREE_KEY, PAID_KEY, StackProcess, eventually, run_headrace

SMALLER = "standard_smaller_model"
#: One reply at a time and two seconds to its first token: a dozen requests overload the large pool.
OPTIONS = ("--sim-ttft-ms", "2000", "--sim-tpot-ms", "1")


def configuration() -> dict[str, Any]:
    raw: dict[str, Any] = development("sim").model_dump(mode="json")
    raw["models"] = {
        "large": {"path": "builtin:sim", "pool": "large", "fallback": "small", "aliases": ["default"]},
        "small": {"path": "builtin:sim", "pool": "small"},
    }
    raw["worker"]["max_seqs"] = 1
    raw["tiers"]["paid"]["ttft_target_seconds"] = 1_000
    raw["tiers"]["free"]["ttft_target_seconds"] = 1
    raw["overload"] |= {
        "raise_seconds": 0.5,
        "lower_seconds": 0.5,
        "wait_factor": 1.5,
        "window_seconds": 2,
        "shrink_floor": 1,
    }
    return raw


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackProcess]:
    folder = tmp_path_factory.mktemp("pools")
    config = folder / "headrace.json"
    config.write_text(json.dumps(configuration()))
    with StackProcess(folder / "data", "--config", str(config), *OPTIONS) as running:
        running.wait_ready(90)
        yield running


@pytest.fixture
async def free(stack: StackProcess) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {FREE_KEY}"}
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(
        base_url=stack.url, headers=headers, timeout=60, limits=limits
    ) as client:
        yield client


async def create(http: httpx.AsyncClient, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **fields}
    return await http.post("/v1/chat/completions", json=body)


def effective(stack: StackProcess) -> Settings:
    return load(stack.data_dir / "settings.json")


async def worker_of(stack: StackProcess, request_id: str) -> str:
    settings = effective(stack)
    client = connect_redis(settings.redis)
    entries = await RedisTokenStreams(client, settings.streams).read_all(request_id)
    await client.aclose()
    return next(e.entry.worker_id for e in entries if isinstance(e.entry, Started))


async def outcome_of(stack: StackProcess, request_id: str) -> OutcomeRecord:
    settings = effective(stack)
    consumer = AIOKafkaConsumer(
        settings.kafka.topics.outcomes,
        bootstrap_servers=settings.kafka.bootstrap,
        auto_offset_reset="earliest",
        fetch_max_wait_ms=50,
    )
    await consumer.start()
    try:
        async with asyncio.timeout(20):
            async for raw in consumer:
                outcome = decode(OutcomeRecord, raw.value)
                if outcome.request_id == request_id:
                    return outcome
    finally:
        await consumer.stop()
    raise AssertionError("unreachable")


def gauge(stack: StackProcess, name: str) -> float:
    port = stack.process_state("scheduler").port
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    return next(float(line.rpartition(" ")[2]) for line in text.split("\n") if line.startswith(name))


async def test_each_request_is_served_by_a_worker_of_its_models_pool(
    stack: StackProcess, free: httpx.AsyncClient
) -> None:
    pools = {(role.index, role.pool) for role in stack.state().roles if role.name == "worker"}
    assert pools == {(0, "large"), (1, "small")}
    for model, named in (("large", "large"), ("default", "large"), ("small", "small")):
        answer = await create(free, model)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == named
        worker = await worker_of(stack, answer.json()["id"])
        assert worker.startswith(f"{named}-")


async def test_n8_under_overload_free_requests_fall_back_and_say_so_and_all_comes_back_to_normal(
    stack: StackProcess, free: httpx.AsyncClient
) -> None:
    flood = [asyncio.create_task(create(free, "large")) for _ in range(12)]
    try:
        fallen = await _until_it_falls_back(free)
        # A paid request still gets the model it asked for.
        async with connect(
            stack.ws_url, additional_headers={"Authorization": f"Bearer {PAID_KEY}"}
        ) as socket:
            assert "degraded" not in await _accepted(socket, "large")
        async with connect(
            stack.ws_url, additional_headers={"Authorization": f"Bearer {FREE_KEY}"}
        ) as socket:
            frame = await _accepted(socket, "large")
            assert frame["model"] == "small"
            assert frame["degraded"]["step"] == SMALLER
    finally:
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
    assert fallen["model"] == "small"
    assert "tier free waits" in fallen["degraded"]["reason"]
    assert (await worker_of(stack, fallen["id"])).startswith("small-")
    outcome = await outcome_of(stack, fallen["id"])
    assert outcome.model == "small"
    assert outcome.degraded is not None
    assert outcome.degraded.step == SMALLER
    log = (stack.data_dir / "logs" / "scheduler-0.log").read_text()
    steps = [json.loads(line) for line in log.split("\n") if '"overload step up"' in line]
    assert [s["after"] for s in steps[:3]] == ["batch_paused", "standard_waits", SMALLER]
    assert {s["pool"] for s in steps} == {"large"}

    def normal() -> bool:
        return gauge(stack, 'headrace_overload_step{pool="large"}') == 0

    await asyncio.to_thread(eventually, normal, 60, "normal service")
    assert "degraded" not in (await create(free, "small")).json()


async def _until_it_falls_back(http: httpx.AsyncClient) -> dict[str, Any]:
    """The first reply of the fallback model."""
    async with asyncio.timeout(60):
        while True:
            body = {"messages": [{"role": "user", "content": uuid.uuid4().hex}], "model": "large"}
            async with http.stream(
                "POST",
                "/v1/chat/completions",
                json={**body, "max_tokens": 2, "leave_grace_seconds": 0, "stream": True},
            ) as probe:
                step = probe.headers.get("x-headrace-degraded")
            if step == SMALLER:
                answer = await create(http, "large")
                assert answer.headers["x-headrace-degraded"] == SMALLER
                found: dict[str, Any] = answer.json()
                return found
            await asyncio.sleep(0.2)


async def _accepted(socket: Any, model: str) -> dict[str, Any]:
    """The first status frame of a request; cancels it."""
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    await socket.send(json.dumps({"type": "chat.create", "ref": 1, "body": body}))
    async with asyncio.timeout(20):
        while True:
            frame: dict[str, Any] = json.loads(await socket.recv())
            assert frame["type"] != "error", frame
            if frame["type"] == "stream.status":
                await socket.send(json.dumps({"type": "chat.cancel", "request_id": frame["request_id"]}))
                return frame


def test_the_status_shows_each_workers_pool(stack: StackProcess) -> None:
    shown = run_headrace("status", "--data-dir", str(stack.data_dir)).stdout
    assert "worker 0 large" in shown
    assert "worker 1 small" in shown


def test_two_models_with_different_weights_in_one_pool_are_refused_by_name(tmp_path: Path) -> None:
    raw = configuration()
    raw["models"]["small"] |= {"pool": "large", "revision": "2"}
    file = tmp_path / "headrace.json"
    file.write_text(json.dumps(raw))
    done = run_headrace("config", "check", str(file))
    assert done.returncode == 78
    assert "models.small.pool: the pool large serves models.large with another revision" in done.stderr
