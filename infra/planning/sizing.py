"""How many GPUs: every shape with what it can do, the smallest that starts, and the one to deploy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .capacity import Capacity, Point, Replica
from .demand import Demand
from .memory import Engine, Shape, in_whole_nodes, shapes
from .roofline import decode_step


@dataclass(frozen=True, slots=True)
class Option:
    """One shape, and what the load takes of it.

    Attributes:
        whole_nodes: whether replicas fill nodes without a rest.
        weight_bytes_per_gpu: in the fullest stage.
        room_tokens: of KV cache in a replica.
        contexts: conversations of the longest context that fit at once.
        alone_tpot_seconds: of one reply that has the replica for itself.
        capacity: under the tiers that wait.
        needed: replicas that the load takes within the planned utilisation; 0 = it cannot be served so.
        total: replicas with the spare ones.
        load: one replica at the peak, all needed ones working and no spare; None = it cannot be served so.
    """

    shape: Shape
    whole_nodes: bool
    weight_bytes_per_gpu: float
    room_tokens: int
    contexts: float
    alone_tpot_seconds: float
    capacity: Capacity
    needed: int
    total: int
    load: Point | None

    @property
    def starts(self) -> bool:
        """Whether the weights and one conversation of the longest context fit: else vLLM refuses to start."""
        return self.contexts >= 1

    @property
    def total_gpus(self) -> int:
        """Of all replicas."""
        return self.total * self.shape.gpus


@dataclass(frozen=True, slots=True)
class Sizing:
    """The answer.

    Attributes:
        weights_only: GPUs whose whole memory the weights alone fill.
        divided: GPUs whose usable memory the weights alone fill.
        options: the best shape of each number of GPUs that holds the weights.
        minimal: the fewest GPUs, in whole nodes, that start; None = no shape does.
        recommended: the fewest GPUs in all that serve the load within its targets; None = no shape does.
    """

    weights_only: int
    divided: int
    options: tuple[Option, ...]
    minimal: Option | None
    recommended: Option | None


def size(engine: Engine, demand: Demand, context: int) -> Sizing:
    """Weigh all shapes. ``context``: tokens that one conversation must be able to have."""
    fitting = [s for s in shapes(engine) if engine.kv_room_tokens(s) > 0]
    options = [weigh(engine, shape, demand, context) for shape in fitting]
    able = [o for o in options if o.starts and o.whole_nodes]
    minimal = min(able, key=lambda o: (o.shape.gpus, o.alone_tpot_seconds), default=None)
    serving = [o for o in able if o.needed]
    recommended = min(serving, key=_cost, default=None)
    return Sizing(
        weights_only=math.ceil(engine.weight_bytes / (engine.gpu.memory_gb * 1e9)),
        divided=math.ceil(engine.weight_bytes / engine.usable_bytes),
        options=tuple(_best_of_each(options)),
        minimal=minimal,
        recommended=recommended,
    )


def weigh(engine: Engine, shape: Shape, demand: Demand, context: int) -> Option:
    """What this shape can do, and how many replicas the load takes.

    The peak of the tiers that wait must fit, and so must the mean of a day with batch work, which runs
    in what the peak leaves free.
    """
    peak = Replica(engine, shape, demand.peak)
    capacity = peak.capacity()
    room = engine.kv_room_tokens(shape)
    needed, load = 0, None
    if capacity.point is not None:
        planned = engine.assume.utilisation
        needed = math.ceil(demand.peak.rate / (capacity.point.rate * planned) - 1e-9)
        over_a_day = Replica(engine, shape, demand.mean).capacity().point
        if over_a_day is None:
            needed = 0
        else:
            needed = max(needed, math.ceil(demand.mean.rate / (over_a_day.rate * planned) - 1e-9))
            load = peak.at_rate(demand.peak.rate / needed)
    return Option(
        shape=shape,
        whole_nodes=in_whole_nodes(engine, shape),
        weight_bytes_per_gpu=engine.weight_bytes_per_gpu(shape),
        room_tokens=room,
        contexts=room / engine.blocks(context),
        alone_tpot_seconds=decode_step(engine, shape, 1, demand.peak.prompt),
        capacity=capacity,
        needed=needed,
        total=needed + engine.assume.spare_replicas if needed else 0,
        load=load,
    )


def _cost(option: Option) -> tuple[float, ...]:
    return (option.total_gpus, option.load.tpot_seconds if option.load else math.inf)


def _best_of_each(options: Iterable[Option]) -> Iterable[Option]:
    """Of each number of GPUs the shape that serves with fewest in all, else the one that starts, else any."""
    by_gpus: dict[int, list[Option]] = {}
    for option in options:
        by_gpus.setdefault(option.shape.gpus, []).append(option)
    for _, group in sorted(by_gpus.items()):
        yield min(
            group,
            key=lambda o: (not o.starts, not o.needed, o.total_gpus, o.alone_tpot_seconds),
        )
