"""The overload ladder's steps, and what of them a request met (docs/OVERLOAD.md)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from .tiers import QueueClass


class OverloadStep(StrEnum):
    """What is done to keep the better classes' time to first token; every step includes those before it."""

    NORMAL = "normal"
    BATCH_PAUSED = "batch_paused"
    STANDARD_WAITS = "standard_waits"
    STANDARD_SMALLER_MODEL = "standard_smaller_model"
    STANDARD_SHORTER = "standard_shorter"
    STANDARD_REFUSED = "standard_refused"
    INTERACTIVE_REFUSED = "interactive_refused"

    @property
    def rank(self) -> int:
        """0 is normal service."""
        return _ORDER[self]

    def reaches(self, other: OverloadStep) -> bool:
        """Whether what ``other`` does is done at this step."""
        return self.rank >= other.rank

    @property
    def degrades(self) -> QueueClass:
        """The class this step takes something from; of normal service: the first that would be."""
        if self is OverloadStep.INTERACTIVE_REFUSED:
            return QueueClass.INTERACTIVE
        return QueueClass.STANDARD if self.rank > 1 else QueueClass.BATCH


_ORDER = {step: rank for rank, step in enumerate(OverloadStep)}


@dataclass(frozen=True, slots=True)
class OverloadLevel:
    """Where a pool stands on the ladder.

    Attributes:
        reason: why it went up last; for people, without anything of a request.
    """

    step: OverloadStep = OverloadStep.NORMAL
    reason: str = ""


class Degraded(BaseModel):
    """What a request got less of.

    Attributes:
        step: the highest :class:`OverloadStep` that changed something for this request.
        reason: why the pool was at that step.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: str
    reason: str
