"""Why so many GPUs: the steps from the weights to the recommendation, in words."""

from __future__ import annotations

from collections.abc import Iterator

from .demand import Demand
from .memory import GB, Engine, divides
from .sizing import Option, Sizing


def reasons(engine: Engine, demand: Demand, sizing: Sizing, context: int) -> list[str]:
    """A sentence or two for each step."""
    steps = [_weights(engine, sizing), _usable(engine, sizing), _kv(engine, context), _cut(engine)]
    if sizing.minimal is None:
        return [
            *steps,
            f"No shape of up to {engine.assume.pp_most} stages holds weights and one conversation.",
        ]
    steps.append(_minimal(engine, sizing.minimal, context))
    steps.extend(_smaller(sizing, sizing.minimal))
    if sizing.recommended is None:
        steps.append(_unserved(engine, sizing))
    else:
        if sizing.minimal.shape.gpus < sizing.recommended.total_gpus:
            steps.append(_not_the_minimum(sizing.minimal, demand))
        steps.append(_recommended(engine, sizing.recommended, demand))
    return steps


def _weights(engine: Engine, sizing: Sizing) -> str:
    gpu, model = engine.gpu, engine.model
    held = sizing.weights_only * gpu.memory_gb
    return (
        f"Weights: {model.parameters / 1e9:,.4g}e9 parameters x {engine.parameter_bytes:g} bytes = "
        f"{engine.weight_bytes / GB:,.4g} GB. {_gpus(sizing.weights_only)} of {gpu.memory_gb:g} GB have "
        f"{held:,.4g} GB: {held - engine.weight_bytes / GB:,.3g} GB would be left for everything else."
    )


def _usable(engine: Engine, sizing: Sizing) -> str:
    assume, gpu = engine.assume, engine.gpu
    return (
        f"Usable: {gpu.memory_gb:g} GB x {assume.memory_utilisation:g} - {assume.workspace_gb:g} GB of "
        f"workspace = {engine.usable_bytes / GB:,.4g} GB a GPU, so {_gpus(sizing.divided)} hold the weights, "
        f"and what they have left is all there is for KV cache."
    )


def _kv(engine: Engine, context: int) -> str:
    model = engine.model
    if model.mla_width:
        per_layer = f"{model.mla_width} numbers"
    else:
        per_layer = f"2 x {model.kv_heads} KV heads x {model.head_size} numbers"
    return (
        f"KV cache: {model.layers} layers x {per_layer} x {engine.kv.bytes} bytes = "
        f"{engine.kv_token_bytes:,} bytes a token: {context * engine.kv_token_bytes / GB:,.3g} GB for one "
        f"conversation of {context:,} tokens. vLLM refuses to start with room for less than one."
    )


def _cut(engine: Engine) -> str:
    degrees = [str(tp) for tp in range(1, engine.gpu.per_node + 1) if divides(engine, tp)]
    return (
        f"Cuts: tensor parallelism stays inside a node of {engine.gpu.per_node} and deals out "
        f"{engine.model.heads} heads and {engine.model.kv_heads} KV heads evenly: {', '.join(degrees)}. More "
        f"GPUs than that are pipeline stages. Replicas fill nodes without a rest."
    )


def _minimal(engine: Engine, least: Option, context: int) -> str:
    shape = least.shape
    return (
        f"Minimum: {_gpus(shape.gpus)} as {shape}: {least.weight_bytes_per_gpu / GB:.1f} GB of weights a "
        f"GPU, room for {least.room_tokens:,} tokens of KV cache = {least.contexts:.1f} conversations of "
        f"{context:,} tokens, or {least.capacity.fits:,} of the mean length."
    )


def _smaller(sizing: Sizing, least: Option) -> Iterator[str]:
    """Numbers of GPUs below the minimum that hold the weights, and what is wrong with them."""
    below = [o for o in sizing.options if o.shape.gpus < least.shape.gpus]
    short = [o for o in below if not o.starts]
    if short:
        most = max(short, key=lambda o: o.shape.gpus)
        yield (
            f"{most.shape.gpus} as {most.shape} hold the weights with room for {most.room_tokens:,} tokens: "
            f"{most.contexts:.2f} of one such conversation."
        )
    ragged = [o for o in below if o.starts]
    if ragged:
        listed = ", ".join(
            f"{o.shape.gpus} ({o.shape}, {o.alone_tpot_seconds * 1e3:.0f} ms)" for o in ragged
        )
        yield (
            f"Fewer would start, too, but leave GPUs of a node unused, and pay for long pipelines with every "
            f"token: {listed} per token for a reply alone; the minimum takes "
            f"{least.alone_tpot_seconds * 1e3:.0f} ms."
        )


def _not_the_minimum(least: Option, demand: Demand) -> str:
    point = least.capacity.point
    if point is None:
        return f"The minimum cannot be deployed: even one reply at a time misses {least.capacity.bound}."
    return (
        f"Why the minimum is not what one deploys: one replica does at most {point.rate:.2f} requests/s "
        f"({point.running:.0f} replies at once; bound: {least.capacity.bound}), the peak is "
        f"{demand.peak.rate:.2f}; at its bound every burst queues; and when one of its "
        f"{_gpus(least.shape.gpus)} fails, nothing is left."
    )


def _recommended(engine: Engine, best: Option, demand: Demand) -> str:
    point, assume = best.capacity.point, engine.assume
    rate = point.rate if point else 0.0
    return (
        f"Recommended: {best.total} replicas of {best.shape} = {_gpus(best.total_gpus)}: {best.needed} for "
        f"{demand.peak.rate:.2f} requests/s at the peak and the day's batch work, each planned at "
        f"{assume.utilisation:.0%} of {rate:.2f} (bound: {best.capacity.bound}), and {assume.spare_replicas} "
        f"spare for a failure or a roll-out. No shape in whole nodes does it with fewer."
    )


def _unserved(engine: Engine, sizing: Sizing) -> str:
    able = [o for o in sizing.options if o.starts and o.whole_nodes]
    fastest = min(able, key=lambda o: o.alone_tpot_seconds)
    return (
        f"No shape serves this load within its targets. The fastest, {fastest.shape}, takes "
        f"{fastest.alone_tpot_seconds * 1e3:.1f} ms per token for a reply alone; it misses: "
        f"{fastest.capacity.bound}. Allow more, or change model, number format or GPU."
    )


def _gpus(count: int) -> str:
    return f"{count:,} GPU" if count == 1 else f"{count:,} GPUs"
