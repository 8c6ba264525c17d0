"""One run: a stack, its load, its faults, the checks, the report.

python -m tests.chaos --minutes 15 --requests 2000 --seed 1 --report chaos.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import redis.asyncio as redis

from infra.model_prep import model_dir
from infra.settings import development
from tests.stack_process import StackProcess

from .batches import BatchClient
from .checks import Rules, check
from .clients import Client
from .evidence import gather, settled
from .faults import ROLES, Injector, plan_faults
from .ledger import Call
from .plan import settings_file, visits
from .report import Report, fill
from .wire import Network

_BROKEN_FENCE = Path(__file__).with_name("broken_fence")
#: How long a request may wait to be started, or for another worker: a worker that has been killed is back
#: in seconds, and with vLLM in a minute, if the other one does not start at the same time.
_MAX_WAIT_SECONDS = {"sim": 60.0, "vllm": 200.0}
#: What makes workers wake while others go on with their replies: long replies, freezes beyond the lease, and
#: always one worker that can take over.
OVERLAP: dict[str, Any] = {
    "targets": ("worker",),
    "actions": ("stop",),
    "frozen_seconds": (3.0, 4.5),
    "spare": 1,
    "tpot_ms": 30.0,
}


@dataclass(frozen=True)
class Options:
    """What a run is like.

    Attributes:
        faults: how many.
        targets: names of the processes that may be hit.
        actions: what may be done to them.
        tpot_ms: time of a token of the simulated engine.
        frozen_seconds: shortest and longest freeze.
        spare: a fault waits while it would leave fewer processes of its target than this.
        break_fence: run workers whose fence does not hold.
    """

    data_dir: Path
    seconds: float
    requests: int
    seed: int
    faults: int
    targets: tuple[str, ...] = ROLES
    actions: tuple[str, ...] = ("kill", "term", "stop")
    engine: str = "sim"
    workers: int = 2
    tpot_ms: float = 10.0
    frozen_seconds: tuple[float, float] = (0.5, 6.0)
    spare: int = 0
    break_fence: bool = False

    @property
    def max_wait_seconds(self) -> float:
        """After so long a request that has not started is expired."""
        return _MAX_WAIT_SECONDS[self.engine]

    @property
    def patience_seconds(self) -> float:
        """How long clients wait for the end of a reply, and the judge for a ready and for a quiet stack."""
        return 2 * self.max_wait_seconds


async def run(options: Options) -> Report:
    """Start a stack, hurt it under load, and judge."""
    options.data_dir.mkdir(parents=True, exist_ok=True)
    config = options.data_dir.parent / f"{options.data_dir.name}.config.json"
    config.write_text(json.dumps(_config(options)))
    arguments = ["--engine", options.engine, "--workers", str(options.workers), "--config", str(config)]
    arguments += ["--sim-tpot-ms", str(options.tpot_ms)]
    env = _environment(options)
    with StackProcess(options.data_dir, *arguments, env=env) as stack:
        await asyncio.to_thread(stack.wait_ready, options.patience_seconds)
        return await _on(stack, options)


async def _on(stack: StackProcess, options: Options) -> Report:
    injector = Injector(stack.state, options.seed, options.spare)
    calls: list[Call] = []
    state = stack.state()
    began = time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        network = Network(state.url, state.ws_url, http)
        client = Client(network, calls, options.seed, options.patience_seconds)
        batches = BatchClient(
            network, options.seed, options.patience_seconds, simulated=options.engine == "sim"
        )
        faults = plan_faults(
            options.seed,
            options.faults,
            options.seconds,
            options.targets,
            options.actions,
            options.frozen_seconds,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(injector.run(faults))
            group.create_task(_load(client, options))
            group.create_task(batches.run(options.seconds))
    loaded = time.monotonic() - began
    await asyncio.to_thread(stack.wait_ready, options.patience_seconds)
    rules = Rules(
        options.max_wait_seconds,
        simulated=options.engine == "sim",
        broker_lost=any(i.fault.target == "broker" and i.fault.action != "stop" for i in injector.done),
        redis_lost=any(i.fault.target == "redis" and i.fault.action != "stop" for i in injector.done),
    )
    redis_client: Any = redis.Redis.from_url(state.redis)
    try:
        took = await settled(stack.state(), redis_client, options.patience_seconds)
        topics = development("sim").kafka.topics
        logs = options.data_dir / "logs"
        evidence = await gather(
            stack.state(), redis_client, topics, logs, outcomes=not rules.broker_lost
        )
    finally:
        await redis_client.aclose()
    calls.sort(key=lambda call: call.plan.number)
    report = Report(options.seed, options.engine, loaded, took, len(calls))
    report.violations = [*check(calls, evidence, rules), *batches.violations]
    report.batch_lines = batches.ended
    report.pauses = {
        f"longest time until {name} was ready again": seconds
        for name, seconds in sorted(injector.recovery_seconds.items())
    }
    report.faults_missed = len(injector.missed)
    report.trouble = evidence.trouble
    report.notes = [f"logs in {logs}"]
    return fill(report, calls, evidence.streams, injector.done)


async def _load(client: Client, options: Options) -> None:
    began = time.monotonic()
    async with (
        asyncio.timeout(options.seconds + 4 * options.patience_seconds),
        asyncio.TaskGroup() as group,
    ):
        for visit in visits(options.seed, options.requests, options.seconds):
            await asyncio.sleep(max(0.0, began + visit.at - time.monotonic()))
            group.create_task(client.visit(visit))


def _config(options: Options) -> dict[str, Any]:
    simulated = options.engine == "sim"
    settings = development("sim") if simulated else development("vllm", str(model_dir()))
    return settings_file(settings.model_dump(mode="json"), options.max_wait_seconds)


def _environment(options: Options) -> dict[str, str]:
    if not options.break_fence:
        return {}
    paths = [str(_BROKEN_FENCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the report, and return 1 if a guarantee did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, help="how many  [default: 14 a minute]")
    parser.add_argument("--targets", help=f"comma-separated  [default: {','.join(ROLES)}]")
    parser.add_argument("--actions", default="kill,term,stop", help="comma-separated")
    parser.add_argument("--redis", action="store_true", help="hit Redis too")
    parser.add_argument("--broker", action="store_true", help="hit the broker too, which then forgets")
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--overlap", action="store_true", help="only frozen workers that wake too late")
    parser.add_argument(
        "--break-fence",
        action="store_true",
        help="--overlap, with workers without a fence: must be caught",
    )
    parser.add_argument("--data-dir", type=Path, help="where the run's folder is made, which is kept")
    parser.add_argument("--report", type=Path, help="JSON file")
    given = parser.parse_args(argv)
    if given.data_dir is not None:
        given.data_dir.mkdir(parents=True, exist_ok=True)
    targets = tuple(given.targets.split(",")) if given.targets else ROLES
    targets += (("redis",) if given.redis else ()) + (("broker",) if given.broker else ())
    options = Options(
        # Always a new folder: a run must not meet the streams and idempotency keys of another.
        data_dir=Path(tempfile.mkdtemp(prefix="headrace-chaos-", dir=given.data_dir)) / "data",
        seconds=given.minutes * 60,
        requests=given.requests,
        seed=given.seed,
        faults=given.faults if given.faults is not None else round(given.minutes * 14),
        targets=targets,
        actions=tuple(given.actions.split(",")),
        engine=given.engine,
        workers=given.workers,
        break_fence=given.break_fence,
    )
    if given.overlap or given.break_fence:
        options = replace(options, **OVERLAP)
    report = asyncio.run(run(options))
    print(report.as_text())
    if given.report is not None:
        given.report.parent.mkdir(parents=True, exist_ok=True)
        given.report.write_text(json.dumps(report.as_json(), indent=1))
    return 1 if report.violations else 0
