"""The overload ladder: queue delays and ``now`` in, the step of one pool out. No clock, no I/O.

A class is degraded for its own delay or a better class's, never for a worse one's: a flood of standard
requests ends in refused standard requests and leaves interactive ones alone. Batch has no delay that counts;
it takes what is left.

Up and down are judged at different thresholds, each for the targets of the step in question (from "standard
waits" on standard tiers have larger ones), and only after a time without a break. So a delay between the
thresholds moves nothing, whatever its noise, and no step is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from contracts.degraded import OverloadLevel, OverloadStep
from contracts.tiers import QueueClass
from infra.settings import OverloadSettings, TierSettings

_LADDER = tuple(OverloadStep)


@dataclass(frozen=True, slots=True)
class StepChange:
    """A pool went one step up or down.

    Attributes:
        reason: what was measured; for operators and for the people it is done to.
    """

    before: OverloadStep
    after: OverloadStep
    reason: str


class OverloadLadder:
    """Where one pool stands.

    Attributes:
        level: the step it is at, and why it went up last.
    """

    def __init__(self, settings: OverloadSettings, tiers: Mapping[str, TierSettings]) -> None:
        self.level = OverloadLevel()
        self._settings = settings
        self._tiers = tiers
        self._observed_at: float | None = None
        self._high_since: float | None = None
        self._low_since: float | None = None

    def reconfigure(self, settings: OverloadSettings, tiers: Mapping[str, TierSettings]) -> None:
        """Go by other settings from now on; the step stays and is judged by them."""
        self._settings = settings
        self._tiers = tiers

    def observe(self, delays: Mapping[str, float], now: float) -> StepChange | None:
        """Take a measurement; the step changes by one at most.

        Args:
            delays: tier to queue delay in seconds; tiers of which nothing waits or was dispatched are absent.
            now: seconds, by a clock that never goes back.
        """
        step = self.level.step
        if not self._settings.enabled:
            return self._go(OverloadStep.NORMAL, "switched off") if step.rank else None
        self._forget_after_a_gap(now)
        higher = _LADDER[step.rank + 1] if step.rank + 1 < len(_LADDER) else None
        lower = _LADDER[step.rank - 1] if step.rank else None
        if higher is not None:
            ratio, tier = self._pressure(delays, step, higher.degrades)
            self._high_since = _since(self._high_since, ratio >= self._settings.raise_ratio, now)
            if _lasted(self._high_since, now, self._settings.raise_seconds):
                reason = f"tier {tier} waits {delays[tier]:.1f} s, {ratio:.1f} times its target"
                return self._go(higher, reason)
        if lower is not None:
            ratio, _ = self._pressure(delays, lower, step.degrades)
            self._low_since = _since(self._low_since, ratio <= self._settings.lower_ratio, now)
            if _lasted(self._low_since, now, self._settings.lower_seconds):
                return self._go(lower, f"no tier waits more than {ratio:.1f} times its target")
        return None

    def _pressure(
        self, delays: Mapping[str, float], step: OverloadStep, worst: QueueClass
    ) -> tuple[float, str]:
        """The largest delay of the classes that are at least as good as ``worst``, in multiples of the target
        at ``step``, and whose it is.
        """
        largest = (0.0, "")
        for name, delay in delays.items():
            tier = self._tiers.get(name)
            if (
                tier is None
                or tier.queue_class is QueueClass.BATCH
                or tier.queue_class.rank > worst.rank
            ):
                continue
            target = tier.ttft_target_seconds
            if tier.queue_class is QueueClass.STANDARD and step.reaches(OverloadStep.STANDARD_WAITS):
                target *= self._settings.wait_factor
            largest = max(largest, (delay / target, name))
        return largest

    def _forget_after_a_gap(self, now: float) -> None:
        """What was not looked at may have been otherwise."""
        gap = now - self._observed_at if self._observed_at is not None else 0.0
        if gap > self._settings.window_seconds:
            self._high_since = self._low_since = None
        self._observed_at = now

    def _go(self, step: OverloadStep, reason: str) -> StepChange:
        change = StepChange(self.level.step, step, reason)
        raised = step.rank > change.before.rank
        why = reason if raised else self.level.reason if step.rank else ""
        self.level = OverloadLevel(step, why)
        self._high_since = self._low_since = None
        return change


def _since(before: float | None, holds: bool, now: float) -> float | None:
    """Since when a condition has held without a break."""
    if not holds:
        return None
    return now if before is None else before


def _lasted(since: float | None, now: float, seconds: float) -> bool:
    return since is not None and now - since >= seconds
