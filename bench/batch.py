"""A large batch whose runner is killed, beside a paid chat: ``python -m bench batch``.

One stack with the simulated engine. First a paid chat alone, then the same chat while a batch of 3 kB lines
runs and its runner is killed with SIGKILL, spread over the batch. Printed: lines a second, where every line
ended, the peak memory of each process, and the chat's time to its first token (TTFT) with and without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from infra.settings import DEV_PAID_KEY
from infra.stack.state import read_state, state_file

from .load import chat_body, stream_http
from .measure import percentile
from .overhead import HEADRACE, ROOT, await_ok, free_port, stopped_after

ENDPOINT = "/v1/chat/completions"
#: How much longer a paid chat's TTFT may be while a batch runs.
TTFT_BOUND = 1.5
_AUTH = {"Authorization": f"Bearer {DEV_PAID_KEY}"}
_FINAL = ("completed", "failed", "expired", "cancelled")


@dataclass
class Outcome:
    """What was seen."""

    upload_seconds: float = 0.0
    batch_seconds: float = 0.0
    kills: list[int] = field(default_factory=list)
    batch: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    peak_mb: dict[str, float] = field(default_factory=dict)
    alone_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median TTFT beside the batch over that without."""
        return percentile(self.beside_ms, 0.5) / percentile(self.alone_ms, 0.5)


def write_input(path: Path, lines: int, line_bytes: int) -> None:
    """An input file whose lines have ``line_bytes`` bytes each, about."""
    with path.open("wb") as file:
        for number in range(lines):
            prompt = f"{number} " + "lorem ipsum " * (line_bytes // 12)
            body = {
                "model": "default",
                "messages": [{"role": "user", "content": prompt[: line_bytes - 160]}],
                "max_tokens": 16,
            }
            line = {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}
            file.write(json.dumps(line).encode() + b"\n")


async def chat(base: str, outcome: list[float], until: asyncio.Event, pause: float) -> None:
    """One paid chat after another, until told to stop; notes each one's TTFT in milliseconds."""
    number = 0
    while not until.is_set():
        number += 1
        timeline = await stream_http(base, DEV_PAID_KEY, chat_body(number, stream=True))
        outcome.append(1000 * timeline.chunks[0])
        await asyncio.sleep(pause)


async def watch_memory(data: Path, peaks: dict[str, float]) -> None:
    """Note the peak memory of every process of the stack, also of those that are killed, until cancelled."""
    while True:
        state = read_state(state_file(data))
        for process in state.roles if state is not None else ():
            if process.pid is not None:
                megabytes = _peak_mb(process.pid)
                peaks[process.name] = max(peaks.get(process.name, 0.0), megabytes)
        await asyncio.sleep(0.2)


def _peak_mb(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    kilobytes = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), "0")
    return int(kilobytes) / 1024


async def run_batch(
    http: httpx.AsyncClient, data: Path, source: Path, lines: int, kills: int, outcome: Outcome
) -> None:
    """Upload, create, kill the runner on the way, and look at every line of the results."""
    start = time.perf_counter()
    with source.open("rb") as file:
        form = {"files": {"file": ("in.jsonl", file)}, "data": {"purpose": "batch"}}
        uploaded = await _json(await asyncio.to_thread(_upload, str(http.base_url), form))
    outcome.upload_seconds = time.perf_counter() - start
    start = time.perf_counter()
    body = {"input_file_id": uploaded["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    batch = await _json(await http.post("/v1/batches", json=body))
    places = [lines * (k + 1) // (kills + 1) for k in range(kills)]
    while batch["status"] not in _FINAL:
        await asyncio.sleep(0.25)
        batch = await _json(await http.get(f"/v1/batches/{batch['id']}"))
        done = batch["request_counts"]["completed"] + batch["request_counts"]["failed"]
        if places and done >= places[0] and _kill_runner(data):
            outcome.kills.append(done)
            places.pop(0)
    outcome.batch_seconds = time.perf_counter() - start
    outcome.batch = batch
    await _check(http, batch, lines, outcome.wrong)


def _upload(base: str, form: dict[str, Any]) -> httpx.Response:
    # httpx sends files from asynchronous clients only when they are in memory.
    return httpx.post(f"{base}/v1/files", headers=_AUTH, timeout=600, **form)


def _kill_runner(data: Path) -> bool:
    state = read_state(state_file(data))
    for process in state.roles if state is not None else ():
        if process.name == "batch-runner" and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
            return True
    return False


async def _json(response: httpx.Response) -> dict[str, Any]:
    if response.status_code != 200:
        raise SystemExit(f"bench: {response.status_code} {response.text[:300]}")
    found: dict[str, Any] = response.json()
    return found


async def _check(http: httpx.AsyncClient, batch: dict[str, Any], lines: int, wrong: list[str]) -> None:
    """Whether every line is in exactly one file, once, and the counts say so."""
    seen: Counter[str] = Counter()
    sizes = {}
    for kind in ("output", "error"):
        sizes[kind] = 0
        file_id = batch[f"{kind}_file_id"]
        if file_id is None:
            continue
        async with http.stream("GET", f"/v1/files/{file_id}/content") as response:
            async for line in response.aiter_lines():
                seen[json.loads(line)["custom_id"]] += 1
                sizes[kind] += 1
    expected = {f"line-{number}" for number in range(lines)}
    counts = batch["request_counts"]
    if batch["status"] != "completed":
        wrong.append(f"the batch is {batch['status']}")
    if seen.keys() != expected:
        wrong.append(f"{len(expected - seen.keys())} lines have no result")
    if repeated := sum(1 for times in seen.values() if times > 1):
        wrong.append(f"{repeated} lines have several results")
    if (counts["total"], counts["completed"], counts["failed"]) != (lines, *sizes.values()):
        wrong.append(f"the counts are {counts}, the files have {sizes}")
    if sizes["error"]:
        wrong.append(f"{sizes['error']} lines failed")


async def measure(base: str, data: Path, options: argparse.Namespace) -> Outcome:
    """Run everything on a stack that is ready."""
    outcome = Outcome()
    source = data.parent / "input.jsonl"
    write_input(source, options.lines, options.line_bytes)
    watching = asyncio.create_task(watch_memory(data, outcome.peak_mb))
    quiet = asyncio.Event()
    asyncio.get_running_loop().call_later(options.alone_seconds, quiet.set)
    await chat(base, outcome.alone_ms, quiet, options.pause)
    over = asyncio.Event()
    chatting = asyncio.create_task(chat(base, outcome.beside_ms, over, options.pause))
    async with httpx.AsyncClient(base_url=base, headers=_AUTH, timeout=60) as http:
        await run_batch(http, data, source, options.lines, options.kills, outcome)
    over.set()
    await chatting
    watching.cancel()
    return outcome


def show(outcome: Outcome, lines: int) -> None:
    """Print the tables."""
    console = Console()
    batch = Table(title=f"A batch of {lines} lines")
    for column in ("upload s", "batch s", "lines/s", "runner killed after", "completed", "failed"):
        batch.add_column(column, justify="right")
    counts = outcome.batch["request_counts"]
    batch.add_row(
        f"{outcome.upload_seconds:.1f}",
        f"{outcome.batch_seconds:.1f}",
        f"{lines / outcome.batch_seconds:.0f}",
        ", ".join(map(str, outcome.kills)) or "never",
        str(counts["completed"]),
        str(counts["failed"]),
    )
    console.print(batch)
    ttft = Table(title="TTFT of a paid chat (ms)")
    for column in ("", "chats", "p50", "p95"):
        ttft.add_column(column, justify="right")
    for name, values in (("alone", outcome.alone_ms), ("beside the batch", outcome.beside_ms)):
        p50, p95 = percentile(values, 0.5), percentile(values, 0.95)
        ttft.add_row(name, str(len(values)), f"{p50:.1f}", f"{p95:.1f}")
    console.print(ttft)
    memory = Table(title="Peak memory (MB)")
    for name in outcome.peak_mb:
        memory.add_column(name, justify="right")
    memory.add_row(*(f"{megabytes:.0f}" for megabytes in outcome.peak_mb.values()))
    console.print(memory)


def main() -> None:
    """Command line. Exit code 1 where a line is missing or doubled, or the chat waits too long."""
    parser = argparse.ArgumentParser(description="A large batch beside a paid chat.")
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--line-bytes", type=int, default=3_000)
    parser.add_argument("--kills", type=int, default=3, help="how often the batch runner is killed")
    parser.add_argument("--alone-seconds", type=float, default=20.0, help="the chat without a batch")
    parser.add_argument("--pause", type=float, default=0.25, help="seconds between two chats")
    options = parser.parse_args()
    port, ws_port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        data = Path(folder, "data")
        up = [str(HEADRACE), "up", "--engine", "sim", "--data-dir", str(data)]
        up += ["--port", str(port), "--ws-port", str(ws_port)]
        stack = subprocess.Popen(up, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
        with stopped_after(stack, signal.SIGINT):
            base = f"http://127.0.0.1:{port}"
            await_ok(f"{base}/readyz", stack, 90)
            outcome = asyncio.run(measure(base, data, options))
    show(outcome, options.lines)
    if outcome.ratio > TTFT_BOUND:
        outcome.wrong.append("the chat waits too long beside the batch")
    print(f"TTFT beside the batch / alone: {outcome.ratio:.2f} (bound {TTFT_BOUND})")
    print("every line once, counts right" if not outcome.wrong else "; ".join(outcome.wrong))
    raise SystemExit(1 if outcome.wrong else 0)


if __name__ == "__main__":
    main()
