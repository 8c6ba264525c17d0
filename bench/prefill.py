"""What long prompts do to a reply that runs: ``python -m bench prefill``.

One real vLLM worker on the CPU. While a reply is written, long prompts arrive together. Printed per setting:
the gaps between the reply's tokens from then on, and when the long prompts got their first tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.model_prep import model_dir
from infra.settings import DEV_PAID_KEY, development

from .load import stream_http
from .measure import Timeline, percentile
from .overhead import HEADRACE, ROOT, await_ok, free_port, stopped_after

CONTEXT_LENGTH = 8_192
REPLY_TOKENS = 400
#: The reply writes alone for so long before the prompts come.
ALONE_SECONDS = 3.0


@dataclass(frozen=True)
class Variant:
    """A row.

    Attributes:
        step_tokens: ``worker.vllm.max_batched_tokens``.
        in_flight: ``scheduler.prefill_tokens_per_worker``.
        prompts: how many long ones arrive.
    """

    name: str
    step_tokens: int
    in_flight: int
    prompts: int


def variants(prompts: int) -> list[Variant]:
    """What is compared; the first is what a reply does alone."""
    default = development("vllm", str(model_dir()))
    step, in_flight = default.worker.vllm.max_batched_tokens, default.scheduler.prefill_tokens_per_worker
    return [
        Variant("no long prompts", step, in_flight, 0),
        Variant("a prompt in one step, no bound", CONTEXT_LENGTH, 1_000_000, prompts),
        Variant("chunked, no bound", step, 1_000_000, prompts),
        Variant("chunked, bound (default)", step, in_flight, prompts),
        Variant("small chunks, bound", 512, 1_536, prompts),
    ]


def configuration(variant: Variant) -> dict[str, Any]:
    """A stack with one worker."""
    raw = development("vllm", str(model_dir())).model_dump(mode="json")
    for model in raw["models"].values():
        model["context_length"] = CONTEXT_LENGTH
    raw["worker"]["vllm"]["max_batched_tokens"] = variant.step_tokens
    raw["scheduler"]["prefill_tokens_per_worker"] = variant.in_flight
    return raw


async def run_reply(base: str, prompts: int, words: int) -> tuple[list[float], list[float]]:
    """Gaps of the reply after the prompts were sent, and the prompts' times to first token; milliseconds."""

    async def say(text: str, tokens: int) -> Timeline:
        body: dict[str, object] = {
            "model": "default",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "min_tokens": tokens,
            "temperature": 0,
            "stream": True,
        }
        return await stream_http(base, DEV_PAID_KEY, body)

    await say("Say hello.", 4)
    reply = asyncio.ensure_future(say("Tell me a long story about a mill.", REPLY_TOKENS))
    await asyncio.sleep(ALONE_SECONDS)
    sent = time.perf_counter()
    long = await asyncio.gather(*(say(f"{n}" + " water" * words, 1) for n in range(prompts)))
    told = await reply
    times = [told.sent + at for at in told.chunks]
    gaps = [1000 * (b - a) for a, b in itertools.pairwise(times) if b > sent]
    return gaps, [1000 * timeline.chunks[0] for timeline in long]


def measure(variant: Variant, words: int) -> tuple[list[float], list[float]]:
    """Run one stack."""
    port, ws_port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as data:
        config = Path(data, "bench.json")
        config.write_text(json.dumps(configuration(variant)))
        up = [str(HEADRACE), "up", "--engine", "vllm", "--data-dir", data, "--config", str(config)]
        up += ["--port", str(port), "--ws-port", str(ws_port)]
        stack = subprocess.Popen(up, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
        with stopped_after(stack, signal.SIGINT):
            base = f"http://127.0.0.1:{port}"
            await_ok(f"{base}/readyz", stack, 240)
            return asyncio.run(run_reply(base, variant.prompts, words))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench prefill", description=__doc__)
    parser.add_argument("--prompts", type=int, default=4, help="long prompts at once  [default: 4]")
    parser.add_argument("--words", type=int, default=3_000, help="of each, about a token each")
    options = parser.parse_args()
    table = Table(
        title=f"{options.prompts} prompts of {options.words:,} words beside a running reply, ms"
    )
    table.add_column("setting")
    for title in ("tokens a step", "in prefill", "gap p50", "p99", "largest", "TTFT first", "TTFT last"):
        table.add_column(title, justify="right")
    for variant in variants(options.prompts):
        gaps, ttft = measure(variant, options.words)
        table.add_row(
            variant.name,
            f"{variant.step_tokens:,}",
            f"{variant.in_flight:,}",
            *(f"{percentile(gaps, share):,.0f}" for share in (0.5, 0.99)),
            f"{max(gaps):,.0f}",
            *(f"{edge(ttft):,.0f}" if ttft else "" for edge in (min, max)),
        )
    Console(width=120).print(table)
