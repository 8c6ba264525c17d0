"""The scheduling benchmark's load, scaled down, through a real stack: ``python -m bench scheduling --live``.

For each policy ``headrace up --engine sim`` runs with a key for each of the 20 tenants; requests arrive when
the load says so, whatever the replies do. Measured from outside, over HTTP. The simulated engine's time to
the first token does not depend on the prompt: long prompts cost nothing here but their way to the worker.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.settings import development, hash_key
from stages.policy import PolicyName
from stages.simulation.load import make_requests
from stages.simulation.load_spec import LoadSpec, parse_load
from stages.simulation.requests import SimRequest

from .load import stream_http
from .measure import percentile
from .overhead import HEADRACE, ROOT, await_ok, free_port, stopped_after

#: Two workers of 8 slots at 20 ms a token: about 3 replies a second, which this many processes carry easily.
LOAD = (
    "overload,load={load},seconds={seconds},workers.count=2,workers.max_seqs=8,workers.step_ms=20,"
    "workers.decode_ms=0,workers.prefill_ms=0,tiers.paid.prompt.most=1000,tiers.free.prompt.most=1000,"
    "tiers.batch.prompt.most=1000,{long}"
)
LONG = ",".join(
    f"tiers.{tier}.long_prompt.{key}"
    for tier in ("paid", "free", "batch")
    for key in ("median=2000", "most=3000")
)
#: After the window, for what still waits.
DRAIN_SECONDS = 180


@dataclass
class Tally:
    """What one tier got. Times in milliseconds."""

    target_ms: float
    requests: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def within_target(self) -> float:
        """Part of all requests whose first token came in time."""
        return sum(t <= self.target_ms for t in self.ttft_ms) / max(1, self.requests)


def live_load(load: float, seconds: float) -> LoadSpec:
    """The scaled-down load."""
    return parse_load(LOAD.format(load=load, seconds=seconds, long=LONG))


def key_of(tenant: str) -> str:
    """The API key of a tenant; the stack listens on loopback only."""
    return f"sk-headrace-bench-{tenant}"


def configuration(spec: LoadSpec, tenants: dict[str, str], policy: PolicyName) -> dict[str, Any]:
    """A stack with a key for each tenant, and nothing in front of the scheduler that turns requests away.

    Args:
        tenants: the tier of each.
    """
    raw = development("sim").model_dump(mode="json")
    raw["worker"] |= {"max_seqs": spec.workers.max_seqs}
    raw["worker"]["sim"] |= {"ttft_ms": spec.workers.step_ms, "tpot_ms": spec.workers.step_ms}
    raw["scheduler"] |= {"policy": policy}
    raw["overload"] |= {"enabled": False}
    raw["tiers"] = {
        name: {"queue_class": tier.queue_class.value, "max_wait_seconds": tier.max_wait_seconds}
        for name, tier in spec.tiers.items()
    }
    raw["keys"] = [
        {"id": tenant, "sha256": hash_key(key_of(tenant)), "tenant": tenant, "tier": tier}
        for tenant, tier in tenants.items()
    ]
    return raw


async def send_all(
    base: str, requests: Sequence[SimRequest], spec: LoadSpec
) -> tuple[dict[str, Tally], float]:
    """Send every request at its time; what came of them by tier, and output tokens a second in the window."""
    tallies = {name: Tally(tier.target_ms) for name, tier in spec.tiers.items()}
    start = time.perf_counter()
    in_window = 0

    async def one(request: SimRequest) -> None:
        nonlocal in_window
        tally = tallies[request.tier]
        tally.requests += 1
        await asyncio.sleep(max(0.0, start + request.at_ms / 1000 - time.perf_counter()))
        body: dict[str, object] = {
            "model": "default",
            "messages": [
                {"role": "user", "content": request.request_id + " word" * request.prompt_tokens}
            ],
            "max_tokens": request.output_tokens,
            "stream": True,
        }
        try:
            timeline = await asyncio.wait_for(
                stream_http(base, key_of(request.tenant), body), spec.seconds + DRAIN_SECONDS
            )
        except (RuntimeError, OSError, TimeoutError) as error:
            tally.errors.append(f"{type(error).__name__}: {error}"[:200])
            return
        tally.ttft_ms.append(1000 * timeline.chunks[0])
        # The simulated engine's chunks are spread evenly over its tokens.
        done = sum(timeline.sent + chunk - start < spec.seconds for chunk in timeline.chunks)
        in_window += round(request.output_tokens * done / len(timeline.chunks))

    await asyncio.gather(*(one(request) for request in requests))
    return tallies, in_window / spec.seconds


def measure(policy: PolicyName, spec: LoadSpec, seed: int) -> tuple[dict[str, Tally], float]:
    """Run one stack under the load."""
    requests = list(make_requests(spec, seed))
    tenants = {request.tenant: request.tier for request in requests}
    port, ws_port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as data:
        config = Path(data, "bench.json")
        config.write_text(json.dumps(configuration(spec, tenants, policy)))
        up = [str(HEADRACE), "up", "--engine", "sim", "--data-dir", data, "--config", str(config)]
        up += ["--port", str(port), "--ws-port", str(ws_port), "--workers", str(spec.workers.count)]
        stack = subprocess.Popen(up, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
        with stopped_after(stack, signal.SIGINT):
            base = f"http://127.0.0.1:{port}"
            await_ok(f"{base}/readyz", stack, 90)
            return asyncio.run(send_all(base, requests, spec))


def run_live(rows: Sequence[tuple[PolicyName, float]], seconds: float, seed: int) -> None:
    """Measure and print.

    Args:
        rows: policies, each with the load it gets.
    """
    table = Table(title=f"Live: {seconds:g} s, 2 workers of 8 slots, seconds")
    for title in ("tier", "policy"):
        table.add_column(title)
    for title in ("requests", "TTFT p50", "p99", "in target", "not served", "output tokens/s"):
        table.add_column(title, justify="right")
    for policy, load in rows:
        tallies, tokens = measure(policy, live_load(load, seconds), seed)
        for tier, tally in tallies.items():
            table.add_row(
                tier,
                f"{policy} at {load:g}",
                str(tally.requests),
                *(f"{percentile(tally.ttft_ms, share) / 1000:.2f}" for share in (0.5, 0.99)),
                f"{tally.within_target:.1%}",
                str(len(tally.errors)),
                f"{tokens:,.0f}",
            )
            for error in tally.errors[:1]:
                print(f"bench: {policy}: {tier}: {error}", file=sys.stderr)
        table.add_section()
    Console(width=120).print(table)
