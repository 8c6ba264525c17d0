"""What a simulation has measured, in plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Mean and percentiles of a time, milliseconds; NaN where nothing was measured."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """The nearest-rank percentiles of some values in any order."""
        ordered = sorted(values)
        if not ordered:
            return cls(*[float("nan")] * 4)
        ranks = (min(len(ordered) - 1, int(share * len(ordered))) for share in (0.5, 0.9, 0.99))
        return cls(math.fsum(ordered) / len(ordered), *(ordered[rank] for rank in ranks))


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier. Times are of the requests that were served; the others are counted.

    Attributes:
        requests: that arrived.
        completed / expired / failed / unfinished: how they ended; unfinished ones had not when it was over.
        preempted: times that a running request was sent back to its line.
        starved: requests that were never started, or were passed over (:class:`~.fairness.Passing`).
        within_target: replies whose first token came within the tier's target.
        ttft / tpot / queue_wait: from arrival to first token; between tokens; from arrival to first dispatch.
        max_gap: largest service gap between two of its tenants while both had requests waiting.
        jain: Jain's index over its tenants.
    """

    requests: int
    completed: int
    expired: int
    failed: int
    unfinished: int
    preempted: int
    starved: int
    within_target: int
    ttft: Quantiles
    tpot: Quantiles
    queue_wait: Quantiles
    max_gap: float
    jain: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at one time: requests waiting by tier, and the share of all slots that is taken."""

    at_ms: float
    waiting: dict[str, int]
    slots_taken: float


@dataclass(frozen=True, slots=True)
class Report:
    """One simulation.

    Attributes:
        policy: its name.
        window_ms: time in which requests arrive; utilisation and tokens are of this time.
        end_ms: when the last request ended, or when it was stopped.
        utilisation: share of slot time in which a request was on a worker.
        tokens_per_second: output tokens of all workers.
        goodput_per_second: replies within their tier's target.
        cached_share: part of all prompt tokens that came from prefix caches or the KV tier.
        loaded_share: part of all prompt tokens that came from the KV tier.
        tiers: by name.
        service: what each tenant has got within the window, in service units, by tier.
        samples: the course of it.
        ttft_course: TTFT by time of arrival, by tier: start of each part of the window and its percentiles.
    """

    policy: str
    window_ms: float
    end_ms: float
    utilisation: float
    tokens_per_second: float
    goodput_per_second: float
    cached_share: float
    loaded_share: float
    tiers: dict[str, TierReport]
    service: dict[str, dict[str, float]]
    samples: list[Sample] = field(repr=False)
    ttft_course: dict[str, list[tuple[float, Quantiles]]] = field(repr=False)

    @property
    def service_per_second(self) -> float:
        """Work done in the window, service units: prompts and replies together."""
        units = sum(sum(of_tier.values()) for of_tier in self.service.values())
        return units / (self.window_ms / 1000)
