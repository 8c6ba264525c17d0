"""From inputs to a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .capacity import Replica
from .demand import Demand, demand_of
from .gpus import PRESETS as GPUS
from .kv_tier import size_kv_tier
from .memory import Engine, Shape
from .models import KvType, WeightType
from .pipeline import size_pipeline
from .plan import Alternative, ByContext, Cost, Plan, PlanInputs
from .roofline import decode_step, prefill
from .sizing import Option, size

_LENGTHS = (2_048, 8_192, 32_768, 131_072, 1_048_576)
_MILLION = 1e6


def make_plan(inputs: PlanInputs) -> Plan:
    """Work everything out."""
    engine = inputs.engine()
    demand = demand_of(inputs.traffic, inputs.assume)
    sizing = size(engine, demand, inputs.longest)
    chosen = sizing.recommended or sizing.minimal
    shape = chosen.shape if chosen else None
    lengths = sorted({n for n in _LENGTHS if n < inputs.longest} | {inputs.longest})
    return Plan(
        demand=demand,
        sizing=sizing,
        shape=shape,
        contexts=tuple(by_context(engine, shape, n) for n in lengths) if shape else (),
        kv_tier=size_kv_tier(engine, shape, demand, inputs.longest) if shape else None,
        pipeline=size_pipeline(
            inputs.assume, demand, sizing.recommended.total if sizing.recommended else 1
        ),
        cost=cost_of(engine, demand, sizing.recommended) if sizing.recommended else None,
        alternatives=tuple(_alternatives(engine, demand, inputs.longest)),
    )


def cost_of(engine: Engine, demand: Demand, option: Option) -> Cost:
    """Of all GPUs of the option, under the mean load of a day."""
    per_hour = option.total_gpus * engine.gpu.price_per_hour
    mix = demand.mean
    output = mix.rate * mix.reply * 3600 / _MILLION
    both = mix.rate * (mix.prompt + mix.reply) * 3600 / _MILLION
    best = Replica(engine, option.shape, demand.peak).capacity().point
    full = best.output_rate(demand.peak) * option.total * 3600 / _MILLION if best else 0.0
    return Cost(per_hour, per_hour / output, per_hour / both, per_hour / full if full else float("inf"))


def by_context(engine: Engine, shape: Shape, tokens: int) -> ByContext:
    """Conversations of one length that have a replica for themselves."""
    fits = engine.kv_room_tokens(shape) // engine.blocks(tokens)
    running = min(fits, engine.assume.max_running)
    step = decode_step(engine, shape, running, tokens) if running else None
    return ByContext(tokens, tokens * engine.kv_token_bytes, fits, prefill(engine, shape, tokens), step)


def _alternatives(engine: Engine, demand: Demand, context: int) -> Iterator[Alternative]:
    """Other number formats on the same GPU, then the same formats on the other GPUs."""
    for weights in WeightType:
        for kv in KvType:
            if (weights, kv) != (engine.weights, engine.kv):
                other = replace(engine, weights=weights, kv=kv)
                yield _alternative(f"{weights} weights, {kv} KV", other, demand, context)
    for gpu in GPUS.values():
        if gpu.name != engine.gpu.name:
            yield _alternative(f"{gpu.name} GPUs", replace(engine, gpu=gpu), demand, context)


def _alternative(name: str, engine: Engine, demand: Demand, context: int) -> Alternative:
    sizing = size(engine, demand, context)
    cost = cost_of(engine, demand, sizing.recommended) if sizing.recommended else None
    return Alternative(name, sizing.minimal, sizing.recommended, cost)
