"""A whole plan: the inputs that make one, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field, model_validator

from .assumptions import Assumptions
from .demand import Demand, Traffic
from .gpus import Gpu
from .kv_tier import KvTier
from .memory import Engine, Shape
from .models import KvType, Model, WeightType
from .parts import Part
from .pipeline import Pipeline
from .roofline import Prefill
from .sizing import Option, Sizing


class PlanInputs(Part):
    """All that a plan is made from.

    Attributes:
        weights: number format; None = as the model is released.
        context: longest conversation that must fit, tokens; None = the model's context.
    """

    model: Model
    gpu: Gpu
    weights: WeightType | None = None
    kv: KvType = KvType.BF16
    context: int | None = Field(default=None, ge=1, le=100_000_000)
    traffic: Traffic = Traffic()
    assume: Assumptions = Assumptions()

    @model_validator(mode="after")
    def _fits_the_context(self) -> PlanInputs:
        for name, tier in self.traffic.tiers.items():
            tokens = (tier.prompt or self.traffic.prompt) + (tier.reply or self.traffic.reply)
            if tokens > self.longest:
                raise ValueError(
                    f"--context: {self.longest:,} tokens, but prompt and reply of tier {name} have {tokens:,}"
                )
        return self

    @model_validator(mode="after")
    def _leaves_memory(self) -> PlanInputs:
        if self.engine().usable_bytes <= 0:
            raise ValueError("--assume workspace_gb: nothing is left of the GPU's memory")
        return self

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation."""
        return self.model.context if self.context is None else self.context

    def engine(self) -> Engine:
        """What the arithmetic starts from."""
        return Engine(self.model, self.gpu, self.weights or self.model.released_as, self.kv, self.assume)


@dataclass(frozen=True, slots=True)
class Cost:
    """What the recommended GPUs cost, in US dollars; nothing else is counted.

    Attributes:
        per_hour: all GPUs, day and night.
        per_million_output / per_million: per 10^6 output tokens, and per 10^6 prompt and output tokens, at
            the mean load of a day.
        per_million_output_full: the same with every replica at its capacity: the floor.
    """

    per_hour: float
    per_million_output: float
    per_million: float
    per_million_output_full: float


@dataclass(frozen=True, slots=True)
class ByContext:
    """One length of conversation on one replica that serves nothing else.

    Attributes:
        kv_bytes: of one.
        fits: how many at once.
        cold: its prefill with nothing cached.
        tpot_seconds: of each when that many run (at most ``max_running``); None = none fits.
    """

    tokens: int
    kv_bytes: float
    fits: int
    cold: Prefill
    tpot_seconds: float | None


@dataclass(frozen=True, slots=True)
class Alternative:
    """The same load with something else changed.

    Attributes:
        minimal / recommended: as in :class:`~.sizing.Sizing`.
        cost: of the recommended ones.
    """

    name: str
    minimal: Option | None
    recommended: Option | None
    cost: Cost | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The result. ``shape`` is what the later sections are about: recommended, else minimal, else None."""

    demand: Demand
    sizing: Sizing
    shape: Shape | None
    contexts: tuple[ByContext, ...]
    kv_tier: KvTier | None
    pipeline: Pipeline
    cost: Cost | None
    alternatives: tuple[Alternative, ...]
