"""How a worker divides its free slots among the schedulers of its pool. Pure.

The worker is the only owner of its slots, so several schedulers need not agree with each other: each gives
no more than it was granted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


def shares(free: int, backlog: Mapping[str, int]) -> dict[str, int]:
    """Divide ``free`` slots: one for each, the rest by backlog (largest remainder; equally without any).

    Args:
        free: slots, 0 or more.
        backlog: choices that wait for a slot, by scheduler id.

    Returns:
        Slots by scheduler id, ``free`` in all; while there are fewer slots than schedulers, those with the
        most backlog have one.
    """
    if not backlog:
        return {}
    order = sorted(backlog, key=lambda s: (-backlog[s], s))
    found = {s: int(place < free) for place, s in enumerate(order)}
    rest = max(0, free - len(order))
    weights = backlog if any(backlog.values()) else dict.fromkeys(order, 1)
    total = sum(weights.values())
    for scheduler in order:
        found[scheduler] += rest * weights[scheduler] // total
    remainders = sorted(order, key=lambda s: -(rest * weights[s] % total))
    for scheduler in remainders[: max(0, free - sum(found.values()))]:
        found[scheduler] += 1
    return found


@dataclass(slots=True)
class _Grant:
    """Slots that a scheduler was told it may give; ``until_ms`` is None for the latest word."""

    left: int
    until_ms: int | None = None


@dataclass
class CreditLedger:
    """What each scheduler may still give, so that no slot is promised twice.

    A grant that is made smaller counts in full for ``hold_ms``: dispatches made on the strength of it may
    still be on their way. What it leaves goes to the others after that.

    Attributes:
        hold_ms: for how long a scheduler may act on what it was told before the latest word.
    """

    hold_ms: int
    _grants: dict[str, list[_Grant]] = field(default_factory=dict)

    def taken(self, scheduler_id: str, choices: int) -> None:
        """A dispatch of a scheduler has arrived: its slots are no longer free but taken."""
        for grant in self._grants.get(scheduler_id, ()):
            grant.left = max(0, grant.left - choices)

    def forget(self, scheduler_id: str) -> None:
        """A scheduler gives no more, and all it gave has come."""
        self._grants.pop(scheduler_id, None)

    def grant(self, free: int, backlog: Mapping[str, int], now_ms: int) -> dict[str, int]:
        """Divide the free slots anew.

        Args:
            free: slots without a reply.
            backlog: choices that wait at each living scheduler; empty = none is known.
            now_ms: any clock that does not step back.

        Returns:
            Slots by scheduler id. They and what was promised before and may still be used are no more
            than ``free``, unless more were taken than granted.
        """
        promised = self._promised(now_ms)
        room = free - sum(promised.values())
        found: dict[str, int] = {}
        for scheduler, share in sorted(
            shares(free, backlog).items(), key=lambda item: (item[1], item[0])
        ):
            kept = min(share, promised.get(scheduler, 0))
            grown = max(0, min(share - kept, room))
            room -= grown
            found[scheduler] = kept + grown
        for scheduler in {*promised, *found}:
            self._note(scheduler, found.get(scheduler, 0), now_ms)
        return found

    def _promised(self, now_ms: int) -> dict[str, int]:
        """The most that each scheduler may still give by what it was told."""
        for scheduler, grants in list(self._grants.items()):
            grants[:] = [g for g in grants if g.left and (g.until_ms is None or g.until_ms > now_ms)]
            if not grants:
                del self._grants[scheduler]
        return {scheduler: max(g.left for g in grants) for scheduler, grants in self._grants.items()}

    def _note(self, scheduler: str, slots: int, now_ms: int) -> None:
        """Add the latest word; earlier ones of no more slots make no difference."""
        grants = [g for g in self._grants.get(scheduler, ()) if g.left > slots]
        for grant in grants:
            if grant.until_ms is None:
                grant.until_ms = now_ms + self.hold_ms
        self._grants[scheduler] = [*grants, _Grant(slots)]
