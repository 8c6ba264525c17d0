"""Decisions of the history stage, without I/O: what is counted, and what is rebuilt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from contracts.records import OutcomeRecord

#: Request ids remembered, so that a repeated outcome is counted once.
REMEMBERED = 50_000


def tier_label(tier: str, known: Collection[str]) -> str:
    """The metric label of a tier: one of the configuration's, or ``other``."""
    return tier if tier in known else "other"


def worth_rebuilding(outcome: OutcomeRecord, now_ms: int, retention_seconds: int) -> bool:
    """Whether a rebuild stores this outcome: part of a conversation that is not forgotten by its age."""
    return outcome.conversation_id is not None and _is_young(outcome, now_ms, retention_seconds)


def worth_keeping(outcome: OutcomeRecord, now_ms: int, retention_seconds: int) -> bool:
    """Whether a rebuild keeps this outcome's reply again: it was to be kept, and its time is not over."""
    return outcome.keep is not None and _is_young(outcome, now_ms, retention_seconds)


def _is_young(outcome: OutcomeRecord, now_ms: int, retention_seconds: int) -> bool:
    return now_ms - outcome.finished_ms < retention_seconds * 1000


@dataclass
class Recent:
    """The request ids seen last. Outcomes come at least once; counters want them once."""

    size: int = REMEMBERED
    _ids: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def is_new(self, request_id: str) -> bool:
        """Whether ``request_id`` is seen for the first time; remembers it."""
        if request_id in self._ids:
            self._ids.move_to_end(request_id)
            return False
        self._ids[request_id] = None
        if len(self._ids) > self.size:
            self._ids.popitem(last=False)
        return True
