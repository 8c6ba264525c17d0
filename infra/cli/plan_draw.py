"""A plan as a picture: memory, latency and throughput, TTFT, contexts, load or recompute, cost."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from infra.planning.capacity import Replica
from infra.planning.memory import GB, Engine
from infra.planning.plan import Plan, PlanInputs
from infra.planning.sizing import Option

from .plan_tables import shown_options
from .simulate_draw import COLOURS

BLUE, RED, GREEN, PINK = COLOURS


def draw(inputs: PlanInputs, plan: Plan, title: str) -> bytes:
    """One PNG of six panels; those that need a shape are empty when nothing fits."""
    engine = inputs.engine()
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 3)
    _memory(axes[0][0], engine, shown_options(plan))
    option = plan.sizing.recommended or plan.sizing.minimal
    if option:
        _decode(axes[0][1], engine, plan, option)
        _ttft(axes[0][2], engine, plan, option)
        _contexts(axes[1][0], plan)
        _loads(axes[1][1], plan)
    _cost(axes[1][2], plan)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _memory(axes: Axes, engine: Engine, options: Sequence[Option]) -> None:
    names = [f"{o.shape.gpus}: {str(o.shape).replace(' ', '')}" for o in options]
    weights = [o.weight_bytes_per_gpu / GB for o in options]
    usable = engine.usable_bytes / GB
    axes.barh(names, weights, color=BLUE, label="weights")
    axes.barh(names, [usable - w for w in weights], left=weights, color=GREEN, label="KV cache")
    axes.axvline(engine.gpu.memory_gb, color="black", linestyle="--", label="memory of the GPU")
    axes.invert_yaxis()
    axes.set(title="memory of one GPU, by shape of a replica", xlabel="GB")
    axes.set_xlim(0, 1.6 * engine.gpu.memory_gb)
    axes.legend(fontsize="small", loc="upper right")


def _decode(axes: Axes, engine: Engine, plan: Plan, option: Option) -> None:
    replica = Replica(engine, option.shape, plan.demand.peak)
    most = max(2, min(option.capacity.fits, engine.assume.max_running))
    counts = sorted({max(1, round(most * i / 40)) for i in range(41)})
    points = [replica.at(n) for n in counts]
    axes.plot(counts, [p.tpot_seconds * 1e3 for p in points], color=BLUE, label="TPOT")
    axes.plot(
        counts, [p.step_seconds * 1e3 for p in points], color=BLUE, linestyle=":", label="no prefills"
    )
    target = plan.demand.peak.tpot_seconds
    if target:
        axes.axhline(target * 1e3, color=RED, linestyle="--", label="target")
    if option.load:
        axes.plot(
            option.load.running, option.load.tpot_seconds * 1e3, "o", color=RED, label="at the peak"
        )
    axes.set(title=f"one replica of {option.shape}", xlabel="replies at once", ylabel="ms per token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    other = axes.twinx()
    rates = [p.output_rate(plan.demand.peak) for p in points]
    other.plot(counts, rates, color=GREEN, label="output tokens/s (right)")
    other.set_ylim(bottom=0)
    lines = [*axes.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
    axes.legend(handles=lines, fontsize="small", loc="lower right")


def _ttft(axes: Axes, engine: Engine, plan: Plan, option: Option) -> None:
    replica = Replica(engine, option.shape, plan.demand.peak)
    best = option.capacity.point or replica.at(1)
    points = [replica.at(best.running * i / 30) for i in range(1, 37)]
    for flow, colour in zip(plan.demand.peak.flows, COLOURS, strict=False):
        reached = [
            (p.rate, p.ttft_seconds[flow.name]) for p in points if p.ttft_seconds[flow.name] < 1e6
        ]
        axes.plot([x for x, _ in reached], [y for _, y in reached], color=colour, label=flow.name)
        if flow.ttft_seconds:
            axes.axhline(flow.ttft_seconds, color=colour, linestyle="--", alpha=0.6)
    if option.load:
        axes.axvline(option.load.rate, color="grey", linestyle=":", label="planned")
    axes.set_yscale("log")
    axes.set(
        title="TTFT, 95 of 100 (targets dashed)", xlabel="requests/s of one replica", ylabel="seconds"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _contexts(axes: Axes, plan: Plan) -> None:
    names = [f"{at.tokens / 1024:,.0f}k" for at in plan.contexts]
    bars = axes.bar(names, [max(at.fits, 0.1) for at in plan.contexts], color=BLUE)
    axes.bar_label(bars, [f"{at.fits:,}" for at in plan.contexts])
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set(title="conversations that fit one replica", xlabel="tokens of each")


def _loads(axes: Axes, plan: Plan) -> None:
    loads = plan.kv_tier.loads if plan.kv_tier else ()
    tokens = [load.tokens for load in loads]
    axes.plot(
        tokens, [load.load_seconds for load in loads], color=GREEN, marker="o", label="load from Redis"
    )
    axes.plot(
        tokens, [load.recompute_seconds for load in loads], color=RED, marker="o", label="recompute"
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(title="a cached prefix", xlabel="tokens", ylabel="seconds")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _cost(axes: Axes, plan: Plan) -> None:
    rows = [(other.name, other.cost.per_million_output) for other in plan.alternatives if other.cost]
    if plan.cost:
        rows.insert(0, ("this plan", plan.cost.per_million_output))
    bars = axes.barh([name for name, _ in rows], [cost for _, cost in rows], color=PINK)
    axes.bar_label(bars, [f" {cost:,.2f}" for _, cost in rows])
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set(title="GPUs per million output tokens", xlabel="US dollars")
