"""A plan as tables of text: one source for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator

from infra.planning.assumptions import describe
from infra.planning.memory import GB, Engine
from infra.planning.plan import Plan, PlanInputs
from infra.planning.sizing import Option

from .plan_tables_around import (
    around_rows,
    kv_tier_rows,
    load_rows,
    size_text,
    time_text,
    topic_rows,
)
from .rows import Rows

_NONE = "-"


def tables(inputs: PlanInputs, plan: Plan) -> Iterator[Rows]:
    """Everything that a plan says, in the order in which it is read."""
    yield _given(inputs, plan)
    yield _options(plan, inputs.engine())
    if plan.sizing.recommended:
        yield _load(plan.sizing.recommended, plan)
    if plan.contexts:
        yield _contexts(plan)
    if plan.kv_tier:
        yield kv_tier_rows(plan.kv_tier)
        yield load_rows(plan.kv_tier)
    yield topic_rows(plan.pipeline)
    yield around_rows(plan.pipeline, plan.cost)
    yield _alternatives(plan)
    yield _assumptions(inputs)


def _given(inputs: PlanInputs, plan: Plan) -> Rows:
    model, gpu, engine = inputs.model, inputs.gpu, inputs.engine()
    beyond = f"; the model's is {model.context:,}" if inputs.longest > model.context else ""
    experts = f", {model.active / 1e9:,.4g}e9 active" if model.experts else ""
    rows: list[tuple[str, ...]] = [
        ("model", f"{model.name}: {model.parameters / 1e9:,.4g}e9 parameters{experts}", model.source),
        ("formats", f"weights {engine.weights}, KV cache {engine.kv}", "--weights, --kv"),
        (
            "context",
            f"{inputs.longest:,} tokens",
            f"longest conversation that must fit: --context{beyond}",
        ),
        ("GPU", _gpu(gpu.name, gpu.memory_gb, gpu.bandwidth_gb_s, gpu.bf16_tflops), gpu.source),
        (
            "price",
            f"$ {gpu.price_per_hour:.2f} a GPU and hour",
            f"assumed: --gpu {gpu.name},price_per_hour=...",
        ),
        ("users", f"{plan.demand.users:,.0f} online at the peak", "--users, or --rate"),
    ]
    mean = {flow.name: flow for flow in plan.demand.mean.flows}
    peak = {flow.name: flow for flow in plan.demand.peak.flows}
    for name, at_mean in mean.items():
        flow = peak.get(name, at_mean)
        when = "at the peak" if name in peak else "mean of the day"
        targets = (
            f"TTFT {flow.ttft_seconds:g} s, TPOT {flow.tpot_seconds * 1e3:g} ms"
            if flow.ttft_seconds and flow.tpot_seconds
            else "no targets"
        )
        lengths = (
            f"{flow.prompt:,.0f} + {flow.reply:,.0f} tokens, {flow.cached / flow.prompt:.0%} cached"
        )
        rows.append((f"tier {name}", f"{flow.rate:,.3g} requests/s {when}", f"{lengths}; {targets}"))
    return Rows("What is planned for", 3, ("", "value", "where from"), rows)


def _gpu(name: str, memory: float, bandwidth: float, tflops: float) -> str:
    return f"{name}: {memory:g} GB, {bandwidth:,.0f} GB/s, {tflops:,.0f} TFLOPS"


def _options(plan: Plan, engine: Engine) -> Rows:
    heads = (
        "GPUs: shape",
        "verdict",
        "weights\nGB/GPU",
        "KV room\ntokens",
        "longest\nfit",
        "replies\nat once",
    )
    more = ("alone\nms/tok", "full\nms/tok", "full\nreq/s", "replicas\n= GPUs")
    rows = [_option(option, plan) for option in shown_options(plan)]
    title = f"Shapes of one replica, {engine.usable_bytes / GB:.1f} GB usable a GPU"
    return Rows(title, 2, heads + more, rows)


def shown_options(plan: Plan) -> list[Option]:
    """Those up to twice the chosen one; below the minimum also the ones that leave a rest."""
    sizing = plan.sizing
    chosen = sizing.recommended or sizing.minimal
    if chosen is None:
        return list(sizing.options[:8])
    least = sizing.minimal.shape.gpus if sizing.minimal else 0
    return [
        o
        for o in sizing.options
        if o.shape.gpus <= 2 * chosen.shape.gpus and (o.whole_nodes or o.shape.gpus < least)
    ]


def _option(option: Option, plan: Plan) -> tuple[str, ...]:
    point = option.capacity.point if option.starts else None
    spare = option.total - option.needed
    return (
        f"{option.shape.gpus}: {str(option.shape).replace(' ', '')}",
        _verdict(option, plan),
        f"{option.weight_bytes_per_gpu / GB:.1f}",
        f"{option.room_tokens:,}",
        f"{option.contexts:.1f}",
        f"{point.running:.0f}" if point else _NONE,
        f"{option.alone_tpot_seconds * 1e3:.0f}",
        f"{point.tpot_seconds * 1e3:.0f}" if point else _NONE,
        f"{point.rate:.2f}" if point else _NONE,
        f"{option.needed}+{spare} = {option.total_gpus}" if option.needed and option.starts else _NONE,
    )


def _verdict(option: Option, plan: Plan) -> str:
    sizing = plan.sizing
    if sizing.recommended and option.shape == sizing.recommended.shape:
        return "recommended"
    if not option.starts:
        return "cannot start"
    if not option.whole_nodes:
        return "splits node"
    if not option.needed:
        return "too slow"
    return "minimal" if sizing.minimal and option.shape == sizing.minimal.shape else ""


def _load(option: Option, plan: Plan) -> Rows:
    heads = ("one replica", "replies\nat once", "req/s", "output\ntok/s", "of all\ntok/s", "TPOT")
    tiers = tuple(f"TTFT\n{flow.name}" for flow in plan.demand.peak.flows)
    rows = []
    points = [("at the peak, spare one lost", option.load), ("at its bound", option.capacity.point)]
    for name, point in points:
        if point:
            rows.append(
                (
                    name,
                    f"{point.running:.0f}",
                    f"{point.rate:.2f}",
                    f"{point.output_rate(plan.demand.peak):,.0f}",
                    f"{point.output_rate(plan.demand.peak) * option.needed:,.0f}",
                    f"{point.tpot_seconds * 1e3:.1f} ms",
                    *(time_text(point.ttft_seconds[flow.name]) for flow in plan.demand.peak.flows),
                )
            )
    title = f"Roofline of {option.shape}, {option.needed} replicas at work (TTFT: 95 of 100 requests)"
    return Rows(title, 1, heads + tiers, rows)


def _contexts(plan: Plan) -> Rows:
    heads = ("conversation of", "KV cache", "fit at once", "TPOT of these", "cold prefill", "chunks")
    rows: list[tuple[str, ...]] = [
        (
            f"{at.tokens:,} tokens",
            size_text(at.kv_bytes),
            f"{at.fits:,}",
            time_text(at.tpot_seconds) if at.tpot_seconds else _NONE,
            time_text(at.cold.latency_seconds),
            f"{at.cold.chunks}",
        )
        for at in plan.contexts
    ]
    return Rows(f"Long contexts: one replica of {plan.shape}, nothing else on it", 1, heads, rows)


def _alternatives(plan: Plan) -> Rows:
    heads = ("instead", "minimal", "recommended", "GPUs", "TPOT", "$/h", "$/M output")
    rows: list[tuple[str, ...]] = []
    for other in plan.alternatives:
        best, cost = other.recommended, other.cost
        rows.append(
            (
                other.name,
                str(other.minimal.shape) if other.minimal else "does not fit",
                f"{best.total} of {best.shape}" if best else "misses a target",
                str(best.total_gpus) if best else _NONE,
                f"{best.load.tpot_seconds * 1e3:.0f} ms" if best and best.load else _NONE,
                f"{cost.per_hour:,.0f}" if cost else _NONE,
                f"{cost.per_million_output:,.2f}" if cost else _NONE,
            )
        )
    return Rows("The same load with something else", 3, heads, rows)


def _assumptions(inputs: PlanInputs) -> Rows:
    rows: list[tuple[str, ...]] = [
        (f"{name}{' *' if changed else ''}", f"{value:,.6g} {unit}", source)
        for name, value, unit, source, changed in describe(inputs.assume)
    ]
    return Rows("Assumptions (* changed): --assume NAME=VALUE", 3, ("name", "value", "source"), rows)
