"""Whether loading a prefix is faster than computing it, by what was measured here of late."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Weight of a new measurement of average size.
_WEIGHT = 0.2
#: Without a measurement for so long, one load may find out anew.
_STALE_SECONDS = 10.0


class Rate:
    """Seconds per unit of work: a moving average in which large pieces of work count for more."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._units = 0.0

    @property
    def per_unit(self) -> float | None:
        """None = never measured."""
        return self._seconds / self._units if self._units else None

    def measured(self, seconds: float, units: float) -> None:
        """A piece of work was done."""
        keep = 1 - _WEIGHT if self._units else 0.0
        self._seconds = self._seconds * keep + seconds
        self._units = self._units * keep + units


class BreakEven:
    """Measured rates of loading and of prefill, and the decision.

    Attributes:
        load: seconds per byte, from the start of a request's load to its end.
        prefill: seconds per token.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.load = Rate()
        self.prefill = Rate()
        self._clock = clock
        self._loaded_at = -_STALE_SECONDS

    def loaded(self, seconds: float, size: int) -> None:
        """A load of ``size`` bytes has ended."""
        self.load.measured(seconds, size)
        self._loaded_at = self._clock()

    def worth_loading(self, tokens: int, size: int, queued_bytes: int) -> bool:
        """Whether to load ``tokens`` of ``size`` bytes, behind ``queued_bytes`` of other loads.

        As long as nothing is known, or what is known of loading is stale, it is worth a try.
        """
        load, prefill = self.load.per_unit, self.prefill.per_unit
        if load is None or prefill is None:
            return True
        now = self._clock()
        if now - self._loaded_at > _STALE_SECONDS:
            self._loaded_at = now
            return True
        return load * (size + queued_bytes) < prefill * tokens
