"""What the KV tier saves and costs: ``python -m bench kv``.

Real vLLM on this machine, several engines side by side in one run, so that ratios are of the same minutes.
For each length of prompt, all of random tokens:

* cold: an engine without the tier computes it;
* miss: an engine with the tier, which has never seen it, computes and saves it (the tax of a miss);
* local: the first engine again, from its own prefix cache;
* redis: another engine with the tier, which has never seen it either, loads it;
* file: an engine with vLLM's example file connector, the second time.

Greedy, so that in float32 all replies can be compared token by token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from redis import Redis
from rich.console import Console
from rich.table import Table

from infra.embedded import embedded_cache
from infra.model_prep import model_dir
from infra.settings import KvSettings
from infra.stack.engine_env import engine_python

from .measure import percentile
from .overhead import ROOT

LENGTHS = (256, 512, 1_024, 1_700, 2_560, 4_096)
WAYS = ("cold", "miss", "local", "redis", "file")
TOKENS = 8


class Engine:
    """A ``bench.kv_engine`` process."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def answer(self) -> dict[str, Any]:
        """Its next result."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"an engine has ended:\n{self._log.read_text(errors='replace')[-3_000:]}")

    def ask(self, prompt: Sequence[int]) -> dict[str, Any]:
        """A reply to a prompt."""
        return self._command({"prompt": prompt, "tokens": TOKENS})

    def forget(self) -> dict[str, float]:
        """Empty its own prefix cache; returns what the tier counted so far."""
        counts: dict[str, float] = self._command({"forget": True})["counts"]
        return counts

    def _command(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self.answer()


@contextmanager
def engine(kind: str, where: str, dtype: str, log: Path) -> Iterator[Engine]:
    """An engine for the length of a block; loading goes on when it begins."""
    command = [str(engine_python()), "-m", "bench.kv_engine", str(model_dir()), dtype, kind, where]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        yield Engine(process, log)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _measure(
    engines: dict[str, Engine], redis: Redis, lengths: Sequence[int], rounds: int, console: Console
) -> dict[int, dict[str, list[dict[str, Any]]]]:
    rng = random.Random(1)
    results: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for length in lengths:
        rows = results[length] = {way: [] for way in WAYS}
        for number in range(rounds):
            redis.flushall()
            prompt = rng.choices(range(1_000, 40_000), k=length)
            first = [("cold", "plain"), ("miss", "saver")]
            for way, name in first if number % 2 else reversed(first):
                rows[way].append(engines[name].ask(prompt))
            rows["local"].append(engines["plain"].ask(prompt))
            engines["file"].ask(prompt)
            engines["file"].forget()
            rows["file"].append(engines["file"].ask(prompt))
            rows["redis"].append(engines["loader"].ask(prompt))
            for each in engines.values():
                each.forget()
            console.print(f"{length} tokens, round {number + 1} of {rounds}", style="dim")
    return results


def _table(results: dict[int, dict[str, list[dict[str, Any]]]]) -> Table:
    table = Table(title="TTFT p50, ms (CPU s until then)", title_justify="left")
    for head in ("prompt", *WAYS, "cold/redis", "cold/file", "tax of a miss", "cached", "same text"):
        table.add_column(head, justify="right")
    for length, rows in results.items():
        half = {way: percentile((r["ttft"] for r in rows[way]), 0.5) for way in WAYS}
        cpu = {way: percentile((r["cpu"] for r in rows[way]), 0.5) for way in WAYS}
        taxes = [m["ttft"] / c["ttft"] - 1 for m, c in zip(rows["miss"], rows["cold"], strict=True)]
        replies = zip(*([r["token_ids"] for r in rows[way]] for way in WAYS), strict=True)
        same = sum(all(reply == each[0] for reply in each) for each in replies)
        table.add_row(
            str(length),
            *(f"{1e3 * half[way]:.0f} ({cpu[way]:.1f})" for way in WAYS),
            f"{half['cold'] / half['redis']:.1f}",
            f"{half['cold'] / half['file']:.1f}",
            f"{100 * percentile(taxes, 0.5):+.1f} %",
            str(rows["redis"][0]["cached"]),
            f"{same} of {len(rows['cold'])}",
        )
    return table


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench kv", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--encoding", default="raw", help="of the values: raw or fp8")
    parser.add_argument("--connections", type=int, default=2)
    options = parser.parse_args()
    console = Console(width=150)
    # Left alone, vLLM binds engines to fewer cores without a connector than with one.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        url = f"redis://{stack.enter_context(embedded_cache(folder, 2_048))}/0"
        files = folder / "files"
        files.mkdir()
        tier = KvSettings(
            enabled=True,
            redis_url=url,
            connections=options.connections,
            encoding=options.encoding,
            lookup_ms=1_000,
            load_seconds=30.0,
        ).model_dump_json()
        kinds = {"plain": ("plain", ""), "saver": ("tier", tier), "loader": ("tier", tier)}
        kinds["file"] = ("file", str(files))
        engines = {}
        for name, (kind, where) in kinds.items():
            made = engine(kind, where, options.dtype, folder / f"{name}.log")
            engines[name] = stack.enter_context(made)
            engines[name].answer()
            console.print(f"the engine '{name}' is loaded", style="dim")
        warm_up = [5] * 300
        for each in engines.values():
            each.ask(warm_up)
            each.forget()
        redis = Redis.from_url(url)
        results = _measure(engines, redis, options.lengths, options.rounds, console)
        console.print(_table(results))
        counts = engines["loader"].forget()
        rate = counts["loaded_bytes"] / counts["load_seconds"] / 1e9
        console.print(f"loaded {counts['loaded_bytes'] / 1e9:.2f} GB at {rate:.2f} GB/s")
        console.print(f"lookups {1e3 * counts['lookup_seconds'] / counts['lookups']:.2f} ms on average")
