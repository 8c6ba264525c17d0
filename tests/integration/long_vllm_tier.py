"""Real vLLM, two workers, one KV tier: what one has computed, the other loads when the first one is dead.

``make takeover`` runs this with the takeovers, for the same reason: every death is followed by a worker that
loads vLLM again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.settings import DEV_FREE_KEY, DEV_PAID_KEY
from tests.integration.takeover_bench import TakeoverBench, takeover_bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK = 128  #: Tokens of vLLM's blocks on the CPU.


def long_text(about: str) -> str:
    """About a thousand tokens."""
    return " ".join(
        f"Rule {i}: a {about} of kind {i * 37 % 101} is kept {i * 7 % 23} days." for i in range(50)
    )


async def test_the_next_turn_goes_on_at_another_worker_and_its_prefix_is_loaded(tmp_path: Path) -> None:
    with takeover_bench(tmp_path, "float32") as bench:
        await _next_turn(bench)
        await bench.both_ready()
        await _takeover(bench)


async def _next_turn(bench: TakeoverBench) -> None:
    turns = [{"role": "system", "content": long_text("parcel")}]
    turns.append({"role": "user", "content": "How long is a parcel of kind 37 kept?"})
    first = await _ask(bench, turns)
    index = await bench.worker_index(first["id"])
    await _saved(bench, index)
    pid = bench.stack.process_state("worker", index).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    turns.append({"role": "assistant", "content": first["text"]})
    turns.append({"role": "user", "content": "And one of kind 74?"})
    loaded_before = await _metric(bench, 1 - index, 'headrace_kv_bytes_total{direction="loaded"}')
    second = await _ask(bench, turns)
    assert await bench.worker_index(second["id"]) == 1 - index
    loaded = (
        await _metric(bench, 1 - index, 'headrace_kv_bytes_total{direction="loaded"}') - loaded_before
    )
    cold = await _ask(bench, turns, key=DEV_FREE_KEY)  # another tenant: nothing of it is anywhere
    assert second["text"] == cold["text"]
    assert cold["cached"] == 0
    assert second["cached"] >= first["prompt"] // BLOCK * BLOCK > 0
    assert loaded > 0
    print(
        f"turn 2 at the other worker: {second['cached']} of {second['prompt']} prompt tokens from the tier "
        f"({loaded / 1e6:.0f} MB), TTFT {second['ttft']:.2f} s; without: {cold['ttft']:.2f} s"
    )


async def _takeover(bench: TakeoverBench) -> None:
    turns = [{"role": "system", "content": long_text("letter")}]
    turns.append({"role": "user", "content": "Tell me a long story about a letter."})
    body = {
        "model": "default",
        "messages": turns,
        "temperature": 0,
        "max_tokens": 80,
        "ignore_eos": True,
    }
    reading = await bench.read(body, 40, bench.kill)
    await bench.check_joined(reading, 80)
    survivor = await bench.worker_index(reading.request_id)
    hit = await _metric(bench, survivor, 'headrace_kv_tokens_total{what="hit"}')
    assert reading.end["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    print(f"takeover at token 40: pause {reading.pause:.2f} s, tokens found in the tier {hit:.0f}")

    whole = await _ask(bench, turns, key=DEV_FREE_KEY, max_tokens=80)
    assert reading.text == whole["text"]


async def _ask(
    bench: TakeoverBench,
    messages: list[dict[str, str]],
    *,
    key: str = DEV_PAID_KEY,
    max_tokens: int = 40,
) -> dict[str, Any]:
    body = {
        "model": "default",
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "dev",  # N1: what a client says of it counts for nothing
    }
    clock = asyncio.get_running_loop().time
    found: dict[str, Any] = {"text": "", "ttft": 0.0}
    headers = {"Authorization": f"Bearer {key}"}
    began = clock()
    async with (
        httpx.AsyncClient(base_url=bench.stack.url, timeout=120, headers=headers) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            found["id"] = chunk["id"]
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") or ""
                found["ttft"] = found["ttft"] or (clock() - began if text else 0.0)
                found["text"] += text
            if usage := chunk.get("usage"):
                found["prompt"] = usage["prompt_tokens"]
                found["cached"] = usage["prompt_tokens_details"]["cached_tokens"]
    return found


async def _saved(bench: TakeoverBench, index: int) -> None:
    """Until a worker has told that it has saved something; it tells with its engine's steps."""
    async with asyncio.timeout(20):
        while not await _metric(bench, index, 'headrace_kv_bytes_total{direction="saved"}'):
            await asyncio.sleep(0.2)
            await _ask(bench, [{"role": "user", "content": "Hi"}], max_tokens=2)


async def _metric(bench: TakeoverBench, index: int, name: str) -> float:
    port = bench.stack.process_state("worker", index).port
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))
