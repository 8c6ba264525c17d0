"""The load a deployment is planned for: who asks, how much, how long, and how soon the answer must begin."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import Field, model_validator

from contracts.tiers import QueueClass

from .assumptions import Assumptions
from .parts import Part

_TOKENS = 100_000_000


class Tier(Part):
    """One tier's part of the traffic; what is None is the traffic's.

    Attributes:
        share: of the requests, relative to the other tiers.
        queue_class: its waiting line; ``batch`` has no targets and is planned by the mean of a day.
        prompt / reply: tokens, on average; prompt includes history and system prompt.
        prefix_hit: part of the prompt's tokens that a cache has.
        ttft_seconds / tpot_ms: targets; TTFT for 95 of 100 requests.
    """

    share: float = Field(gt=0, le=1e6)
    queue_class: QueueClass = QueueClass.INTERACTIVE
    prompt: int | None = Field(default=None, ge=1, le=_TOKENS)
    reply: int | None = Field(default=None, ge=1, le=_TOKENS)
    prefix_hit: float | None = Field(default=None, ge=0, lt=1)
    ttft_seconds: float | None = Field(default=None, gt=0, le=1e6)
    tpot_ms: float | None = Field(default=None, gt=0, le=1e6)


_TIERS = {
    "paid": Tier(share=0.3),
    "free": Tier(share=0.6, queue_class=QueueClass.STANDARD, ttft_seconds=10.0),
    "batch": Tier(share=0.1, queue_class=QueueClass.BATCH),
}


class Traffic(Part):
    """Everything that is asked for, at the peak.

    Attributes:
        users: online at the peak; None = as many as ``rate`` needs.
        rate: requests/s at the peak, batch included; None = that of the users, 1,000 if neither is given.
        prompt, reply, prefix_hit, ttft_seconds, tpot_ms: of tiers that do not say their own.
    """

    users: int | None = Field(default=None, ge=1, le=10_000_000_000)
    rate: float | None = Field(default=None, gt=0, le=1e7)
    prompt: int = Field(default=2_000, ge=1, le=_TOKENS)
    reply: int = Field(default=400, ge=1, le=_TOKENS)
    prefix_hit: float = Field(default=0.5, ge=0, lt=1)
    ttft_seconds: float = Field(default=2.0, gt=0, le=1e6)
    tpot_ms: float = Field(default=100.0, gt=0, le=1e6)
    tiers: dict[str, Tier] = Field(default=_TIERS, min_length=1, max_length=20)

    @model_validator(mode="after")
    def _somebody_waits(self) -> Traffic:
        if all(tier.queue_class is QueueClass.BATCH for tier in self.tiers.values()):
            raise ValueError("tiers: one of them must not be batch")
        return self


@dataclass(frozen=True, slots=True)
class Flow:
    """One tier with everything filled in.

    Attributes:
        rate: requests/s at the peak; of a batch tier the mean of the day.
        cached: prompt tokens a cache has, on average.
        ttft_seconds / tpot_seconds: targets; None for batch.
    """

    name: str
    queue_class: QueueClass
    rate: float
    prompt: float
    reply: float
    cached: float
    ttft_seconds: float | None
    tpot_seconds: float | None


@dataclass(frozen=True, slots=True)
class Mix:
    """Flows that share replicas."""

    flows: tuple[Flow, ...]

    @property
    def rate(self) -> float:
        """Requests/s."""
        return sum(flow.rate for flow in self.flows)

    @property
    def prompt(self) -> float:
        """Tokens of the mean request's prompt."""
        return self._mean([flow.prompt for flow in self.flows])

    @property
    def reply(self) -> float:
        """Tokens of the mean reply."""
        return self._mean([flow.reply for flow in self.flows])

    @property
    def cached(self) -> float:
        """Tokens of the mean prompt that a cache has."""
        return self._mean([flow.cached for flow in self.flows])

    @property
    def tpot_seconds(self) -> float | None:
        """The strictest target: all replies of a step take the same time."""
        return min((f.tpot_seconds for f in self.flows if f.tpot_seconds is not None), default=None)

    def _mean(self, values: list[float]) -> float:
        return sum(f.rate * v for f, v in zip(self.flows, values, strict=True)) / self.rate


@dataclass(frozen=True, slots=True)
class Demand:
    """What has to be served.

    Attributes:
        users: online at the peak.
        peak: the tiers with people who wait, at the peak.
        mean: all tiers, batch too, by the mean of a day.
    """

    users: float
    peak: Mix
    mean: Mix


def demand_of(traffic: Traffic, assume: Assumptions) -> Demand:
    """Fill in what tiers and traffic leave open."""
    users, rate = traffic.users, traffic.rate
    if users is None and rate is None:
        users = 1_000
    if rate is None:
        rate = (users or 0) * assume.requests_per_user_hour / 3600
    shares = sum(tier.share for tier in traffic.tiers.values())
    at_peak = [_flow(name, tier, traffic, rate / shares) for name, tier in traffic.tiers.items()]
    waited = tuple(flow for flow in at_peak if flow.queue_class is not QueueClass.BATCH)
    mean = tuple(replace(flow, rate=flow.rate * assume.mean_over_peak) for flow in at_peak)
    return Demand(users or rate * 3600 / assume.requests_per_user_hour, Mix(waited), Mix(mean))


def _flow(name: str, tier: Tier, traffic: Traffic, rate_per_share: float) -> Flow:
    batch = tier.queue_class is QueueClass.BATCH
    prompt = tier.prompt or traffic.prompt
    hit = traffic.prefix_hit if tier.prefix_hit is None else tier.prefix_hit
    return Flow(
        name=name,
        queue_class=tier.queue_class,
        rate=tier.share * rate_per_share,
        prompt=prompt,
        reply=tier.reply or traffic.reply,
        cached=hit * prompt,
        ttft_seconds=None if batch else tier.ttft_seconds or traffic.ttft_seconds,
        tpot_seconds=None if batch else (tier.tpot_ms or traffic.tpot_ms) / 1000,
    )
