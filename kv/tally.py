"""What the KV tier did since it was last asked: counts that can be added up and sent between processes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

#: Prefixes of one report, of either kind; it is a hint, and more of them come with the next ones.
NEWS = 1_024
#: Rates are news when they have changed by so much.
_CHANGE = 0.05

#: Microseconds per token to load from the tier, and to prefill; None = not measured yet.
Rates = tuple[float | None, float | None]


class Tally:
    """Counts by name, and prefixes that have come to the tier or were missed there. Of any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self._held: dict[str, bool] = {}
        self._rates: Rates = (None, None)
        self._told: Rates = (None, None)

    def add(self, name: str, amount: float = 1) -> None:
        """Count something."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def held(self, names: Iterable[bytes], yes: bool = True) -> None:
        """Full chunks are in the tier, or are not; the latest word counts."""
        with self._lock:
            for name in names:
                key = name.hex()
                self._held.pop(key, None)
                self._held[key] = yes
            while len(self._held) > NEWS:
                del self._held[next(iter(self._held))]

    def rates(self, load_us_per_token: float | None, prefill_us_per_token: float | None) -> None:
        """The rates as measured now."""
        self._rates = load_us_per_token, prefill_us_per_token

    def take(self) -> dict[str, Any]:
        """All of it, as plain data (see :func:`added`); empty if there is nothing."""
        with self._lock:
            report: dict[str, Any] = {}
            if self._counts:
                report["counts"], self._counts = self._counts, {}
            if self._held:
                report["held"], self._held = self._held, {}
            if any(map(_differs, self._rates, self._told)):
                report["rates"] = self._told = self._rates
        return report


def added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two reports as one: ``counts`` by name, ``held`` by prefix (in hex), ``rates``.

    Args:
        other: the later one.
    """
    counts = dict(one.get("counts", {}))
    for name, amount in other.get("counts", {}).items():
        counts[name] = counts.get(name, 0) + amount
    later = other.get("held", {})
    held = {prefix: yes for prefix, yes in one.get("held", {}).items() if prefix not in later} | later
    both = {"counts": counts, "held": dict(list(held.items())[-NEWS:])}
    rates = other.get("rates") or one.get("rates")
    return both | ({"rates": rates} if rates else {})


def _differs(now: float | None, told: float | None) -> bool:
    if now is None or told is None:
        return now is not told
    return abs(now - told) > _CHANGE * told
