"""How evenly tenants are served: service gaps, Jain's index, and who is passed over."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: Backlogged tenants of a tier that are compared pair by pair at one time.
MOST_COMPARED = 64


@dataclass
class GapMeter:
    """The largest difference of service between two equal tenants while both have requests waiting.

    Over any interval in which two tenants are both backlogged, a fair scheduler gives them service that
    differs by a bounded amount (arXiv 2401.00588, theorem 4.4). The difference over the worst interval is
    the range of the running difference, so its largest and smallest value are all that is kept of a pair.

    Attributes:
        worst: the largest difference so far, in service units.
    """

    worst: float = 0.0
    _pairs: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def sample(
        self, service: Mapping[str, float], backlogged: Sequence[str], unbroken: set[str]
    ) -> None:
        """Take the state at one time.

        Args:
            service: what each tenant has got so far.
            backlogged: tenants with requests waiting now.
            unbroken: those of them that had some ever since the last sample.
        """
        pairs: dict[tuple[str, str], tuple[float, float]] = {}
        for pair in itertools.combinations(sorted(backlogged)[:MOST_COMPARED], 2):
            difference = service[pair[0]] - service[pair[1]]
            low, high = difference, difference
            known = self._pairs.get(pair)
            if known is not None and pair[0] in unbroken and pair[1] in unbroken:
                low, high = min(low, known[0]), max(high, known[1])
                self.worst = max(self.worst, high - low)
            pairs[pair] = low, high
        self._pairs = pairs


def max_min_shares(demands: Mapping[str, float], total: float) -> dict[str, float]:
    """The max-min fair split of ``total``: what one has not asked for goes to the others."""
    shares: dict[str, float] = {}
    left = min(total, sum(demands.values()))
    ordered = sorted(demands.items(), key=lambda item: item[1])
    for position, (name, demand) in enumerate(ordered):
        shares[name] = min(demand, left / (len(ordered) - position))
        left -= shares[name]
    return shares


def jain_index(service: Mapping[str, float], demands: Mapping[str, float]) -> float:
    """Jain's index of what each tenant got over its max-min fair share: 1 is fair, 1/n is one has all.

    R. Jain, D. Chiu, W. Hawe, "A quantitative measure of fairness", DEC-TR-301, 1984.
    """
    shares = max_min_shares(demands, sum(service.get(name, 0.0) for name in demands))
    ratios = [service.get(name, 0.0) / share for name, share in shares.items() if share > 0]
    squares = sum(ratio * ratio for ratio in ratios)
    return sum(ratios) ** 2 / (len(ratios) * squares) if squares else 1.0


@dataclass
class Line:
    """The waiting requests of one tenant in one tier.

    Attributes:
        waiting: since when each waits, in the order in which they came.
        served_ms: when one of them was last started.
        broken: whether it was empty since this was last reset.
    """

    waiting: dict[str, float] = field(default_factory=dict)
    served_ms: float = 0.0
    broken: bool = True


@dataclass
class Passing:
    """Finds starved requests.

    A request is starved when its line (its tenant's, in its tier) has waited for longer than ``patience_ms``
    without any start, although requests that came later were started from other lines. Waiting behind
    one's own tenant is not starving, and nobody starves in first come first served.

    Attributes:
        starved: tier of each starved request, by id.
    """

    patience_ms: float
    starved: dict[str, str] = field(default_factory=dict)
    _youngest_ms: float = -1.0

    def started(self, line: Line, tier: str, request_id: str, now_ms: float) -> None:
        """A request leaves its line for a worker."""
        self.judge(line, tier, now_ms)
        since_ms = line.waiting.pop(request_id, now_ms)
        self._youngest_ms = max(self._youngest_ms, since_ms)
        line.served_ms = now_ms
        line.broken = line.broken or not line.waiting

    def judge(self, line: Line, tier: str, now_ms: float) -> None:
        """Count the requests of a line that were passed over up to now."""
        for request_id, since_ms in line.waiting.items():
            if now_ms - max(since_ms, line.served_ms) <= self.patience_ms:
                break
            if since_ms < self._youngest_ms:
                self.starved[request_id] = tier
