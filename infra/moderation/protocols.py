"""The seam of moderation: what checks texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a moderator thinks of the texts it was given, taken together.

    Attributes:
        refused: whether they must not go on.
        category: what they were refused for, from the moderator's own fixed list; empty if let through.
        score: how sure it is, in [0, 1]; a rule that matches says 1.
        reason: for operators' logs; never contains the text.
    """

    refused: bool
    category: str = ""
    score: float = 0.0
    reason: str = ""


ALLOWED = Verdict(refused=False)


class Moderator(Protocol):
    """Decides whether texts may go on.

    Failure: any exception but ``CancelledError`` means "could not check", never "allowed". A moderator
    keeps no deadline of its own: the composition that calls it (:mod:`infra.moderation.guard`) cancels it
    at the configured one and applies the configured policy, to nonsensical verdicts as well. Checking is
    idempotent and free of side effects, so it may be repeated and cancelled at any time.
    """

    @property
    def name(self) -> str:
        """A short constant, used as a metric label."""

    async def check(self, texts: Sequence[str]) -> Verdict:
        """Check texts in any number and of any length; must not block the event loop for long."""
