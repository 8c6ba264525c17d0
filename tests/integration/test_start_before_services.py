"""Gateway and edge that are started before there is any Redis or Kafka (H11)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect as ws_connect

from infra.embedded import (
    BROKER_FETCH_MAX_WAIT_MS,
    LOOPBACK,
    broker_answers,
    broker_command,
    die_with_parent,
    free_port,
    redis_answers,
    redis_command,
    running,
)
from infra.settings import DEV_PAID_KEY, development, parse
from infra.topics import ensure_topics
from tests.integration.worker_bench import eventually
from tests.stack_process import PROJECT

pytestmark = pytest.mark.timeout(60)

HEADERS = {"Authorization": f"Bearer {DEV_PAID_KEY}"}


class Early:
    """Both processes, and the ports on which their services will be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.redis, self.broker, self.http, self.ws = (free_port() for _ in range(4))
        raw: dict[str, Any] = development("sim").model_dump(mode="json")
        raw["redis"]["url"] = f"redis://{LOOPBACK}:{self.redis}/0"
        raw["kafka"] |= {
            "bootstrap": f"{LOOPBACK}:{self.broker}",
            "fetch_max_wait_ms": BROKER_FETCH_MAX_WAIT_MS,
            "idempotent": False,
        }
        raw["http"]["port"], raw["edge"]["port"] = self.http, self.ws
        self.settings = parse(raw)
        self.ops: dict[str, int] = {}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        config = self.folder / "headrace.json"
        config.write_text(self.settings.model_dump_json())
        for module in ("producers", "streaming_edge"):
            ops = self.ops[module] = free_port()
            command = [sys.executable, "-m", module, "--config", str(config), "--ops-port", str(ops)]
            with (self.folder / f"{module}.log").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        command, cwd=PROJECT, stdout=log, stderr=log, preexec_fn=die_with_parent
                    )
                )

    async def states(self) -> list[int | None]:
        """What ``/readyz`` of each answers; None = nothing yet."""
        assert [p.poll() for p in self.processes] == [None, None]
        found: list[int | None] = []
        async with httpx.AsyncClient(timeout=2) as http:
            for port in self.ops.values():
                try:
                    found.append((await http.get(f"http://{LOOPBACK}:{port}/readyz")).status_code)
                except httpx.HTTPError:
                    found.append(None)
        return found

    async def are(self, status: int) -> bool:
        return await self.states() == [status, status]

    def tried(self) -> bool:
        logs = [(self.folder / f"{module}.log").read_text() for module in self.ops]
        return all("start failed, trying again" in log for log in logs)


@pytest.fixture
def early(tmp_path: Path) -> Iterator[Early]:
    made = Early(tmp_path)
    made.start()
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.wait(10)


async def test_what_starts_before_its_services_waits_unready_and_serves_once_they_are_there_H11(
    early: Early,
) -> None:
    await eventually(lambda: early.are(503), "both answer that they are not ready", 30)

    async def tried() -> bool:
        return early.tried()

    await eventually(tried, "both have tried", 30)
    with ExitStack() as services:
        redis = redis_command(early.redis, early.folder / "data")
        there = partial(redis_answers, LOOPBACK, early.redis)
        services.enter_context(running(redis, there, early.folder / "redis.log"))
        assert await early.are(503), "Kafka is still away"
        broker = broker_command(early.broker, early.folder)
        there = partial(broker_answers, LOOPBACK, early.broker)
        services.enter_context(running(broker, there, early.folder / "broker.log"))
        await ensure_topics(early.settings)
        await eventually(lambda: early.are(200), "both are ready", 30)
        async with httpx.AsyncClient(headers=HEADERS, timeout=10) as http:
            models = await http.get(f"http://{LOOPBACK}:{early.http}/v1/models")
            assert models.status_code == 200
        body = {"model": "default", "messages": [{"role": "user", "content": "x"}]}
        address = f"ws://{LOOPBACK}:{early.ws}/v1/ws"
        async with ws_connect(address, additional_headers=HEADERS) as socket:
            await socket.send(json.dumps({"type": "chat.create", "ref": "r", "body": body}))
            assert json.loads(await socket.recv())["type"] == "chat.accepted"
