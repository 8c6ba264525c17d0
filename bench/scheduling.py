"""Who gets the GPU under overload: ``python -m bench scheduling`` (``make bench-scheduling``).

One run, the same requests for each policy: first come first served, strict priority as in vLLM's own
scheduler, and Headrace's. 60 s at twice what the workers can do; 3 tiers, 20 tenants of which one floods,
one prompt in ten is long (``stages/simulation/presets.py``). Headrace's policy also runs without overload,
as what its times are compared with. All in virtual time, so the numbers are the same on every machine;
``--live`` sends a smaller load of the same shape through a real stack.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from infra.cli.simulate import garbage_kept, print_reports, write_results
from infra.settings import SchedulerSettings, development
from stages.policy import PolicyName, make_policy
from stages.simulation.experiment import Experiment
from stages.simulation.load_spec import LoadSpec, parse_load
from stages.simulation.meter import Yardstick
from stages.simulation.report import Report

from .scheduling_live import run_live

#: Work offered over what the workers can do: overloaded, and busy as a service is that has enough of them.
OVERLOADED = 2.0
NOT_OVERLOADED = 0.8
OURS: PolicyName = "fair"
POLICIES: tuple[PolicyName, ...] = ("fcfs", "strict", OURS)


def gap_bound(spec: LoadSpec, settings: SchedulerSettings) -> float:
    """The most by which the service of two backlogged tenants may differ: 2 U of docs/SCHEDULING.md."""
    workers, yardstick = spec.workers, Yardstick(0.0, {})
    longest = max(
        max(tier.prompt.most, tier.long_prompt.most if tier.long_share else 0)
        for tier in spec.tiers.values()
    )
    # A tenant can have all slots, each with the longest reply, as far as the KV caches have room for them.
    replies = workers.count * workers.max_seqs * max(tier.reply.most for tier in spec.tiers.values())
    unborn = min(workers.count * workers.kv_tokens, replies)
    prompts = yardstick.prompt_weight * longest
    return 2 * (settings.locality_quantum + prompts + yardstick.output_weight * unborn)


def run(seed: int, workers: int) -> tuple[list[Report], LoadSpec]:
    """All rows: the policies under overload, and ours without."""
    settings = development("sim")
    overloaded = parse_load(f"overload,load={OVERLOADED},workers.count={workers}")
    calm = overloaded.model_copy(update={"load": NOT_OVERLOADED})
    reports = []
    with garbage_kept():
        for name in POLICIES:
            experiment = Experiment.of_load(overloaded, seed)
            reports.append(experiment.run(name, make_policy, settings))
        reference = Experiment.of_load(calm, seed).run(OURS, make_policy, settings)
    return [*reports, replace(reference, policy=f"{OURS} at {NOT_OVERLOADED:g}")], overloaded


def verdicts(reports: list[Report], spec: LoadSpec) -> list[str]:
    """What the policy promises under overload, and what was measured."""
    fcfs, _, ours, calm = reports
    paid, paid_calm = ours.tiers["paid"].ttft.p99, calm.tiers["paid"].ttft.p99
    starved = sum(row.starved for row in ours.tiers.values())
    gap = max(row.max_gap for row in ours.tiers.values())
    bound = gap_bound(spec, development("sim").scheduler)
    work = ours.service_per_second / fcfs.service_per_second
    slots = ours.utilisation / fcfs.utilisation
    return [
        f"{_mark(paid <= 1.5 * paid_calm)} paid TTFT p99 {paid:,.0f} ms, {paid / paid_calm:.2f} times its "
        f"{paid_calm:,.0f} ms without overload (at most 1.5)",
        f"{_mark(starved == 0)} starved requests: {starved} (none)",
        f"{_mark(gap <= bound)} largest service gap of equal tenants {gap:,.0f}, bound {bound:,.0f}",
        f"{_mark(work >= 0.97)} work done {work:.1%} of first come first served's (at least 97%); "
        f"slots taken {slots:.1%}",
    ]


def _mark(kept: bool) -> str:
    return "kept  " if kept else "BROKEN"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Who gets the GPU under overload.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=8, help="more make the percentiles steadier")
    parser.add_argument("--out", type=Path, help="folder for the picture, the page and the numbers")
    parser.add_argument(
        "--live", action="store_true", help="through a real stack, scaled down; takes minutes"
    )
    parser.add_argument("--live-seconds", type=float, default=60.0, help="window of the live load")
    options = parser.parse_args()
    if options.live:
        rows = [*((name, OVERLOADED) for name in POLICIES), (OURS, NOT_OVERLOADED)]
        run_live(rows, options.live_seconds, options.seed)
        return
    reports, spec = run(options.seed, options.workers)
    print_reports(reports)
    for line in verdicts(reports, spec):
        print(line)
    if options.out:
        write_results(options.out, reports[:3], "twice the load the workers can do, for 60 s")


if __name__ == "__main__":
    main()
