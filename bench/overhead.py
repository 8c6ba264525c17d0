"""What the pipeline adds to an engine: ``python -m bench.overhead`` (``make bench``).

One run, side by side: the simulated engine alone (in this process), the same engine behind a plain FastAPI
endpoint, and the whole pipeline over HTTP and over the websocket, at 1, 16 and 64 clients; each reply is 32
tokens, one every 5 ms. Prints TTFT p50/p99 and what is added to the engine alone, the p99 gap between
chunks, chunks/s, and CPU seconds per 1,000 tokens by role.

The load generator runs in a process of its own per row, so that its cost is seen (row ``load``) and its
event loop is not shared with the engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.settings import SimSettings

from .measure import CpuMeter, Run, closed_loop, percentile

TOKENS = 32
TPOT_MS = 5.0
ROOT = Path(__file__).resolve().parent.parent
HEADRACE = Path(sys.executable).parent / "headrace"


@dataclass(frozen=True)
class Row:
    """One line of the table; times in milliseconds."""

    road: str
    clients: int
    ttft_p50: float
    ttft_p99: float
    gap_p99: float
    chunks_per_second: float
    errors: int
    load_cpu: float
    tokens: int
    cpu: dict[str, float]


def row_of(road: str, clients: int, run: Run, cpu: dict[str, float], load_cpu: float) -> Row:
    """Summarise a run."""
    return Row(
        road,
        clients,
        percentile(run.ttft_ms, 0.5),
        percentile(run.ttft_ms, 0.99),
        percentile(run.gaps_ms, 0.99),
        run.chunks_per_second,
        len(run.errors),
        load_cpu,
        run.chunks,
        cpu,
    )


def free_port() -> int:
    """A port on loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_ok(url: str, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until ``url`` answers 200."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"bench: {process.args!r} ended with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"bench: {url} was not ready within {seconds:.0f} s")


@contextmanager
def stopped_after(process: subprocess.Popen[bytes], sig: int) -> Iterator[None]:
    """Send ``sig`` to a process at the end, and kill it if it does not stop."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.send_signal(sig)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def load(road: str, target: str, clients: int, requests: int) -> tuple[Run, float]:
    """Run one row's load in a process of its own; returns its result and its CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run.json")
        command = [
            sys.executable,
            "-m",
            "bench.load",
            road,
            target,
            str(clients),
            str(requests),
            str(out),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=False)
        if done.returncode:
            raise SystemExit(f"bench: the load failed: {done.stderr.decode()[-500:]}")
        raw: dict[str, Any] = json.loads(out.read_text())
    return Run.from_json(raw["run"]), float(raw["cpu_seconds"])


def measure(clients: list[int], requests_per_client: int) -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    upstream_port, http_port, ws_port = free_port(), free_port(), free_port()
    data = tempfile.mkdtemp(prefix="headrace-bench-")
    upstream = subprocess.Popen(
        [
            *(sys.executable, "-m", "uvicorn", "bench.plain_upstream:app"),
            *("--port", str(upstream_port), "--log-level", "error"),
        ],
        cwd=ROOT,
        env={**os.environ, "BENCH_TPOT_MS": str(TPOT_MS)},
    )
    up = [str(HEADRACE), "up", "--engine", "sim", "--data-dir", data, "--port", str(http_port)]
    up += ["--ws-port", str(ws_port), "--sim-ttft-ms", "0", "--sim-tpot-ms", str(TPOT_MS)]
    stack = subprocess.Popen(up, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    with stopped_after(upstream, signal.SIGTERM), stopped_after(stack, signal.SIGINT):
        await_ok(f"http://127.0.0.1:{upstream_port}/healthz", upstream, 20)
        await_ok(f"http://127.0.0.1:{http_port}/readyz", stack, 90)
        roads = {
            "plain FastAPI": ("http", f"http://127.0.0.1:{upstream_port}", {"plain": [upstream.pid]}),
            "pipeline, HTTP": ("http", f"http://127.0.0.1:{http_port}", role_pids(data)),
            "pipeline, websocket": ("ws", f"ws://127.0.0.1:{ws_port}/v1/ws", role_pids(data)),
        }
        for road, target, _ in roads.values():
            load(road, target, 4, 16)
        for count in clients:
            requests = max(20, count * requests_per_client)
            run, cpu = asyncio.run(engine_alone(count, requests))
            rows.append(row_of("engine alone", count, run, {"engine": cpu}, 0.0))
            for name, (road, target, pids) in roads.items():
                meter = CpuMeter(pids)
                run, load_cpu = load(road, target, count, requests)
                rows.append(row_of(name, count, run, meter.since(), load_cpu))
                for error in run.errors[:1]:
                    print(f"bench: {name}: {error}", file=sys.stderr)
    return rows


def role_pids(data: str) -> dict[str, list[int]]:
    """Process ids of a running stack, by role."""
    command = [str(HEADRACE), "status", "--json", "--data-dir", data]
    status = json.loads(subprocess.run(command, capture_output=True, timeout=20, check=True).stdout)
    pids: dict[str, list[int]] = {}
    for role in status["roles"]:
        pids.setdefault(role["name"], []).append(role["pid"])
    return pids


async def engine_alone(clients: int, requests: int) -> tuple[Run, float]:
    """The simulated engine driven directly, and its CPU seconds (load included)."""
    from .plain_upstream import engine_timeline, start_engine

    engine = await start_engine(SimSettings(ttft_ms=0, tpot_ms=TPOT_MS))
    before = time.process_time()
    try:
        run = await closed_loop(lambda i: engine_timeline(engine, i, TOKENS), clients, requests)
    finally:
        await engine.close()
    return run, time.process_time() - before


def show(rows: list[Row]) -> None:
    """Print the two tables."""
    console = Console(width=150)
    alone = {row.clients: row.ttft_p50 for row in rows if row.road == "engine alone"}
    table = Table(title=f"{TOKENS} tokens at {TPOT_MS:g} ms, closed loop, {os.cpu_count()} cores")
    for title in ("clients", "road", "TTFT p50 ms", "added", "TTFT p99 ms", "gap p99 ms", "chunks/s"):
        table.add_column(title, justify="left" if title == "road" else "right")
    table.add_column("errors", justify="right")
    for row in rows:
        table.add_row(
            str(row.clients),
            row.road,
            f"{row.ttft_p50:.1f}",
            f"{row.ttft_p50 - alone[row.clients]:+.1f}",
            f"{row.ttft_p99:.1f}",
            f"{row.gap_p99:.1f}",
            f"{row.chunks_per_second:,.0f}",
            str(row.errors),
        )
    console.print(table)
    names = list(dict.fromkeys(name for row in rows for name in row.cpu))
    cpu = Table(title="CPU seconds per 1,000 tokens")
    for title in ("clients", "road", *names, "load generator"):
        cpu.add_column(title, justify="left" if title == "road" else "right")
    for row in rows:
        per = 1_000 / max(1, row.tokens)
        cells = [f"{row.cpu[n] * per:.3f}" if n in row.cpu else "" for n in names]
        cpu.add_row(str(row.clients), row.road, *cells, f"{row.load_cpu * per:.3f}")
    console.print(cpu)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="What the pipeline adds to an engine.")
    parser.add_argument("--clients", default="1,16,64", help="numbers of clients, comma-separated")
    parser.add_argument("--requests-per-client", type=int, default=8)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    rows = measure([int(c) for c in options.clients.split(",")], options.requests_per_client)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps([row.__dict__ for row in rows], indent=1))


if __name__ == "__main__":
    main()
