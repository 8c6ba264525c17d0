"""What the KV tier's connector reports, as metrics and as news for the schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.telemetry import (
    KV_BYTES,
    KV_FAILURES,
    KV_LOAD_SECONDS,
    KV_LOOKUP_SECONDS,
    KV_LOOKUPS,
    KV_TOKENS,
    KV_US_PER_TOKEN,
)
from kv.tier import OFFLOAD_EVENTS

from .protocols import TierNews

_COUNTS = {
    "lookups": KV_LOOKUPS,
    "lookup_seconds": KV_LOOKUP_SECONDS,
    "load_seconds": KV_LOAD_SECONDS,
    "loaded_bytes": KV_BYTES.labels("loaded"),
    "saved_bytes": KV_BYTES.labels("saved"),
    "looked_up_tokens": KV_TOKENS.labels("looked_up"),
    "hit_tokens": KV_TOKENS.labels("hit"),
    "computed_instead_tokens": KV_TOKENS.labels("computed_instead"),
}
_FAILURES = {"lookup_failed_": "lookup", "load_failed_": "load", "save_dropped_": "save"}
#: Prefixes that wait to be told; the oldest are dropped.
_WAITING = 4_096


class TierReports:
    """Reports of one engine; see :class:`kv.tally.Tally`.

    Attributes:
        counts: all that was counted, by name.
    """

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}
        self._held: dict[str, bool] = {}
        self._load: float | None = None
        self._prefill: float | None = None

    def take_in(self, report: Mapping[str, Any]) -> None:
        """A report has come, of our connector or of vLLM's offloading with our tier below it."""
        offloaded = report.get("data", {}).get(OFFLOAD_EVENTS, {})
        counts = {name: amount for (name,), amount in offloaded.items()} | report.get("counts", {})
        for name, amount in counts.items():
            self.counts[name] = self.counts.get(name, 0) + amount
            _count(name, amount)
        for prefix, yes in report.get("held", {}).items():
            self._held.pop(prefix, None)
            self._held[prefix] = yes
        while len(self._held) > _WAITING:
            del self._held[next(iter(self._held))]
        if "rates" in report:
            self._load, self._prefill = report["rates"]
            for what, rate in (("load", self._load), ("prefill", self._prefill)):
                if rate is not None:
                    KV_US_PER_TOKEN.labels(what).set(rate)

    def take_news(self, limit: int) -> TierNews:
        """See :meth:`workers.protocols.Engine.take_tier_news`."""
        told = list(self._held)[:limit]
        news = TierNews([], [], self._load, self._prefill)
        for prefix in told:
            (news.held if self._held.pop(prefix) else news.missing).append(prefix)
        return news


def _count(name: str, amount: float) -> None:
    if name in _COUNTS:
        _COUNTS[name].inc(amount)
        return
    for start, operation in _FAILURES.items():
        if name.startswith(start):
            KV_FAILURES.labels(operation, name.removeprefix(start)).inc(amount)
