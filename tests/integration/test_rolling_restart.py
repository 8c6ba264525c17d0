"""Every role of a stack is restarted in turn while it serves: nobody sees an error (Q1 Q4)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from aiokafka import AIOKafkaConsumer, TopicPartition
from openai import AsyncOpenAI
from websockets.asyncio.client import connect

from infra.settings import development
from tests.chaos.expected import Turn, full_text, prompt_ids
from tests.stack_process import PAID_KEY, StackProcess

TOKENS = 60
ORDER = [
    ("gateway", 0),
    ("edge", 0),
    ("moderation", 0),
    ("scheduler", 0),
    ("history", 0),
    ("worker", 0),
    ("worker", 1),
]


@dataclass
class Load:
    """Clients that ask again and again, without any retry of their own; what they get is judged."""

    url: str
    ws_url: str
    stopping: bool = False
    asked: int = 0
    done: Counter[str] = field(default_factory=Counter)
    slowest_seconds: float = 0.0
    went_elsewhere: int = 0
    faults: list[str] = field(default_factory=list)

    async def loop(self, kind: str, ask: Callable[[dict[str, Any]], Awaitable[list[str]]]) -> None:
        while not self.stopping:
            self.asked += 1
            prompt = f"{kind} {self.asked}"
            body = {
                "model": "default",
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": TOKENS,
            }
            expected = full_text(prompt_ids([Turn("user", prompt)]), None, 0, TOKENS)
            began = time.monotonic()
            try:
                async with asyncio.timeout(40):
                    *pieces, end = await ask(body)
                if ("".join(pieces), end) != (expected, "length"):
                    self.faults.append(f"{prompt}: {end}, {len(''.join(pieces))}/{len(expected)}")
            except Exception as error:
                self.faults.append(f"{prompt}: {error!r} {getattr(error, 'body', '')}")
            self.done[kind] += 1
            self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - began)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        headers = {"Authorization": f"Bearer {PAID_KEY}"}
        async with (
            httpx.AsyncClient(base_url=self.url, headers=headers, timeout=40) as http,
            AsyncOpenAI(
                base_url=f"{self.url}/v1", api_key=PAID_KEY, max_retries=0, timeout=40
            ) as openai,
            asyncio.TaskGroup() as group,
        ):
            for number in range(2):
                group.create_task(self.loop(f"sse{number}", lambda body: read_events(http, body)))
                group.create_task(self.loop(f"openai{number}", lambda body: read_openai(openai, body)))
                group.create_task(self.loop(f"whole{number}", lambda body: read_whole(http, body)))
                group.create_task(self.loop(f"socket{number}", self.read_socket))
            try:
                yield
            finally:
                self.stopping = True

    async def read_socket(self, body: dict[str, Any]) -> list[str]:
        """As the page does: reconnect at the last offset, and ask again where nothing was accepted."""
        key = uuid.uuid4().hex
        request_id = offset = None
        pieces: list[str] = []
        while True:
            create = {"type": "chat.create", "ref": 1, "body": body, "idempotency_key": key}
            resume = {"type": "stream.subscribe", "request_id": request_id, "after": offset}
            try:
                async with connect(self.ws_url, close_timeout=1) as socket:
                    await socket.send(json.dumps({"type": "auth", "api_key": PAID_KEY}))
                    await socket.send(json.dumps(create if request_id is None else resume))
                    while True:
                        frame = json.loads(await socket.recv())
                        offset = frame.get("offset", offset)
                        match frame["type"]:
                            case "chat.accepted":
                                request_id = frame["request_id"]
                            case "stream.text":
                                pieces.append(frame["text"])
                            case "stream.end":
                                return [*pieces, frame["finish_reason"] or frame["status"]]
                            case "error":
                                raise AssertionError(frame)
            except websockets.ConnectionClosed as closed:
                if closed.rcvd is None or closed.rcvd.code != 1012:
                    raise
            except websockets.InvalidStatus as refused:
                if refused.response.status_code != 503:
                    raise
            self.went_elsewhere += 1


async def read_events(http: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
    pieces: list[str] = []
    ends: list[str] = []
    async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            assert "[DONE]" not in ends
            if line == "data: [DONE]":
                ends.append("[DONE]")
                continue
            choice = json.loads(line[6:])["choices"][0]
            pieces.append(choice["delta"].get("content", ""))
            if choice["finish_reason"]:
                ends.append(choice["finish_reason"])
    assert len(ends) == 2, ends
    return [*pieces, ends[0]]


async def read_openai(client: AsyncOpenAI, body: dict[str, Any]) -> list[str]:
    pieces, end = [], "none"
    async for chunk in await client.chat.completions.create(**body, stream=True):
        pieces.append(chunk.choices[0].delta.content or "")
        end = chunk.choices[0].finish_reason or end
    return [*pieces, end]


async def read_whole(http: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return [choice["message"]["content"], choice["finish_reason"]]


async def until(condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what()}"
        await asyncio.sleep(0.05)


@pytest.fixture
def stack(tmp_path: Path) -> Any:
    raw = development("sim").model_dump(mode="json")
    # Shorter than a reply takes: some replies finish here, some go on with the other worker.
    raw["worker"]["drain_seconds"] = 1.0
    config = tmp_path / "headrace.json"
    config.write_text(json.dumps(raw))
    options = ("--config", str(config), "--workers", "2", "--sim-tpot-ms", "25")
    with StackProcess(tmp_path / "data", *options) as running:
        running.wait_ready(60)
        yield running
        assert running.stop() == 0


async def test_q1_q4_a_rolling_restart_of_every_role_under_load_is_not_noticed(
    stack: StackProcess,
) -> None:
    load = Load(stack.url, stack.ws_url)
    async with load.running():
        await until(lambda: load.done.total() >= 8, 20, lambda: str(load))
        for name, index in ORDER:
            await restart(stack, name, index)
            seen = load.done.total()
            await until(lambda seen=seen: load.done.total() >= seen + 8, 20, lambda: str(load))  # type: ignore[misc]
    assert load.faults == []
    assert load.went_elsewhere >= 1, "the edge's sockets were closed"
    assert "handed_over" in (stack.data_dir / "logs" / "worker-0.log").read_text()
    await check_positions(stack, load.asked)


async def restart(stack: StackProcess, name: str, index: int) -> None:
    before = stack.process_state(name, index)
    pid = before.pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)

    def is_back() -> bool:
        now = stack.process_state(name, index)
        return now.ready and now.pid not in (None, pid) and now.last_exit is not None

    await until(is_back, 30, lambda: str(stack.process_state(name, index)))
    assert stack.process_state(name, index).last_exit == 0
    assert stack.process_state(name, index).restarts == before.restarts + 1


async def check_positions(stack: StackProcess, requests: int) -> None:
    """All positions are committed, and next to nothing was done twice."""
    kafka = stack.state().kafka
    prefix = "headrace"
    read = {
        f"{prefix}-moderation": f"{prefix}.requests",
        f"{prefix}-scheduler": f"{prefix}.queue.interactive",
        f"{prefix}-history": f"{prefix}.outcomes",
        f"{prefix}-worker-default": f"{prefix}.dispatch.default",
    }
    for group, topic in read.items():
        consumer = AIOKafkaConsumer(
            bootstrap_servers=kafka, group_id=group, enable_auto_commit=False, session_timeout_ms=2_000
        )
        await consumer.start()
        try:
            partitions = [TopicPartition(topic, n) for n in consumer.partitions_for_topic(topic) or ()]
            assert partitions
            async with asyncio.timeout(15):
                while True:
                    ends = await consumer.end_offsets(partitions)
                    committed = {p: await consumer.committed(p) or 0 for p in partitions}
                    if all(committed[p] >= ends[p] for p in partitions):
                        break
                    await asyncio.sleep(0.2)
            # A restarted stage reads again what it had in hand; a burst would be a multiple of that.
            assert sum(ends.values()) <= requests + 40, (group, ends, requests)
        finally:
            await consumer.stop()
