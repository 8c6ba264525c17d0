"""Limits on a whole stack with two gateways: nobody slips past, and everything comes back (area J)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
import pytest
import redis.asyncio as redis
from websockets.asyncio.client import ClientConnection, connect

from infra.embedded import die_with_parent
from infra.settings import development, hash_key
from infra.stack.state import SETTINGS_FILE
from tests.stack_process import PROJECT, StackProcess, eventually

LIMITS: dict[str, dict[str, int]] = {
    "hundred": {"requests_per_minute": 100},
    "one": {"concurrent": 1},
    "socket": {"concurrent": 1, "tokens_per_minute": 10_000},
    "both": {"requests_per_minute": 2, "concurrent": 1},
    "tokens": {"tokens_per_minute": 5_000, "tokens_per_day": 100_000},
    "killed": {"concurrent": 30, "tokens_per_minute": 100_000},
    "proxied": {"requests_per_minute": 1},
}
QUICK = {"max_tokens": 1}
SLOW = {"max_tokens": 400, "leave_grace_seconds": 0}


@dataclass
class Rig:
    urls: list[str]
    ws_url: str
    http: aiohttp.ClientSession
    redis: Any
    second_pid: int

    def post(self, key: str, gateway: int = 0, **fields: Any) -> Any:
        """A call; ``fields`` go into its body."""
        headers = {"Authorization": f"Bearer sk-{key}"} | fields.pop("headers", {})
        turn = {"role": "user", "content": f"{key} {time.monotonic_ns()}"}
        body = {"model": "default", "messages": [turn], **fields}
        return self.http.post(f"{self.urls[gateway]}/v1/chat/completions", json=body, headers=headers)

    async def status(self, key: str, gateway: int = 0, **fields: Any) -> tuple[int, str | None]:
        """Status and error code of a call."""
        async with self.post(key, gateway, **fields) as response:
            answer = await response.json()
            return response.status, answer.get("error", {}).get("code")

    async def passes(self, key: str, seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while (await self.status(key, **QUICK))[0] != 200:
                await asyncio.sleep(0.05)

    async def counter(self, name: str, field: str) -> int:
        """One counter of a scope, 0 where there is none."""
        values = await self.redis.hgetall(f"hr:{{limits}}:{name}")
        return sum(int(v) for f, v in values.items() if f.decode().endswith(field))

    async def settled(self, seconds: float = 15.0) -> None:
        """Wait until every reservation is settled."""
        async with asyncio.timeout(seconds):
            while await self.redis.keys("hr:{limits}:taken:*"):
                await asyncio.sleep(0.05)

    @asynccontextmanager
    async def socket(self, key: str) -> AsyncIterator[ClientConnection]:
        headers = {"Authorization": f"Bearer sk-{key}"}
        async with connect(self.ws_url, additional_headers=headers) as ws:
            yield ws


def configuration() -> dict[str, Any]:
    raw = development("sim").model_dump(mode="json")
    raw["keys"] += [
        {"id": name, "sha256": hash_key(f"sk-{name}"), "tenant": name, "tier": "paid", "limits": limits}
        for name, limits in LIMITS.items()
    ]
    return raw


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackProcess]:
    folder = tmp_path_factory.mktemp("limits")
    config = folder / "headrace.json"
    config.write_text(json.dumps(configuration()))
    options = ("--config", str(config), "--sim-ttft-ms", "1", "--sim-tpot-ms", "10")
    with StackProcess(folder / "data", *options) as running:
        running.wait_ready(90)
        yield running


@pytest.fixture(scope="module")
def second(stack: StackProcess) -> Iterator[tuple[int, str]]:
    """Process id and URL of a second gateway."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--config", str(stack.data_dir / SETTINGS_FILE), "--port", str(port), "--ops-port", "0"]
    gateway = subprocess.Popen(
        [sys.executable, "-m", "producers", *options],
        cwd=PROJECT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return httpx.get(f"{url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    try:
        eventually(ready, 30, "the second gateway is ready")
        yield gateway.pid, url
    finally:
        gateway.kill()
        gateway.wait()


@pytest.fixture
async def rig(stack: StackProcess, second: tuple[int, str]) -> AsyncIterator[Rig]:
    client = redis.Redis.from_url(stack.state().redis)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=60)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            yield Rig([stack.url, second[1]], stack.ws_url, http, client, second[0])
    finally:
        await client.aclose()


async def test_a_thousand_at_once_over_two_gateways_pass_exactly_a_hundred_times_J4(rig: Rig) -> None:
    calls = (rig.status("hundred", n % 2, **QUICK) for n in range(1_000))
    answers = Counter(await asyncio.gather(*calls))
    assert answers == {(200, None): 100, (429, "requests_limit_exceeded"): 900}
    await rig.settled()


async def test_concurrency_comes_back_after_every_broken_stream_J1(rig: Rig) -> None:
    for _ in range(10):
        async with rig.post("one", stream=True, **SLOW) as response:
            assert response.status == 200
            await response.content.readuntil(b'"content":"')
            assert await rig.status("one", 1, **QUICK) == (429, "concurrency_limit_exceeded")
            response.close()
        await rig.passes("one")


async def test_concurrency_comes_back_after_every_dropped_socket_J1(rig: Rig) -> None:
    for _ in range(5):
        async with rig.socket("socket") as ws:
            await ws.send(json.dumps(_create(**SLOW)))
            accepted = json.loads(await ws.recv())
            assert accepted["type"] == "chat.accepted"
            assert accepted["rate_limits"]["tokens"]["limit"] == 10_000
            await ws.send(json.dumps(_create(**QUICK)))
            async with asyncio.timeout(5):
                while (frame := json.loads(await ws.recv()))["type"] != "error":
                    pass
            assert frame["error"]["code"] == "concurrency_limit_exceeded"
            assert frame["retry_after_seconds"] >= 1
            assert frame["rate_limits"]["tokens"]["remaining"] < 10_000
        await rig.passes("socket")


async def test_a_refused_call_takes_nothing_of_another_limit_J5(rig: Rig) -> None:
    async with rig.post("both", stream=True, **SLOW) as running:
        await running.content.readuntil(b'"content":"')
        for _ in range(3):
            assert await rig.status("both", **QUICK) == (429, "concurrency_limit_exceeded")
        running.close()
    await rig.passes("both")
    async with rig.post("both", **QUICK) as refused:
        assert refused.status == 429
        assert (await refused.json())["error"]["code"] == "requests_limit_exceeded"
        assert 50 <= int(refused.headers["retry-after"]) <= 61
        assert refused.headers["x-ratelimit-limit-requests"] == "2"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"


async def test_what_was_used_is_booked_whoever_ended_it_J11_J2(rig: Rig) -> None:
    async with rig.post("tokens", max_tokens=20) as done:
        used = (await done.json())["usage"]["total_tokens"]
        assert done.headers["x-ratelimit-limit-tokens"] == "5000"
        assert 4_900 < int(done.headers["x-ratelimit-remaining-tokens"]) < 4_981
    await rig.settled()
    assert await rig.counter("key:tokens:t", "") == used
    async with rig.post("tokens", stream=True, **SLOW) as left:
        await left.content.readuntil(b'"content":"')
        left.close()
    assert (await rig.status("tokens", max_tokens=5_001))[1] == "request_exceeds_limit"
    assert (await rig.status("tokens", messages=[{"role": "jester", "content": "x"}]))[0] == 400
    await rig.settled()
    spent = await rig.counter("key:tokens:d", ":t")
    assert used < spent < used + 300
    assert await rig.counter("key:tokens:t", "") == spent


async def test_a_made_up_forwarding_header_changes_nothing_J10(rig: Rig) -> None:
    addresses = [{"headers": {"X-Forwarded-For": f"10.0.0.{n}"}} for n in range(4)]
    answers = [await rig.status("proxied", **QUICK, **address) for address in addresses]
    assert [status for status, _ in answers] == [200, 429, 429, 429]


async def test_a_killed_gateway_leaves_nothing_taken_J2(rig: Rig) -> None:
    """The last one here: there is no second gateway after it."""
    async with AsyncExitStack() as calls:
        running = [
            await calls.enter_async_context(rig.post("killed", 1, stream=True, **SLOW))
            for _ in range(20)
        ]
        await asyncio.gather(*(call.content.readuntil(b'"content":"') for call in running))
        os.kill(rig.second_pid, signal.SIGKILL)
        await rig.settled(30)
    assert await rig.counter("key:killed:h", "sum") == 0
    assert await rig.redis.zcard("hr:{limits}:key:killed:o") == 0


def _create(**fields: Any) -> dict[str, Any]:
    turn = {"role": "user", "content": f"hello {time.monotonic_ns()}"}
    return {"type": "chat.create", "ref": 1, "body": {"model": "default", "messages": [turn], **fields}}
