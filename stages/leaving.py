"""Which of the waiting requests are looked at next for readers, and which of them are due. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.absence import AbsenceTracker, Sighting
from contracts.records import QueuedRecord

#: Bounds of a turn. A turn takes a quarter of what waits, so that each request is looked at once a second
#: (with a turn every quarter of one); beyond four times the upper bound it takes longer.
TURN_LEAST, TURN_MOST = 64, 1_024


class WaitingReaders:
    """Takes turns through the waiting requests, and judges what was seen of their readers."""

    def __init__(self) -> None:
        self._tracker = AbsenceTracker()
        self._after = ""

    def turn(self, request_ids: Sequence[str]) -> list[str]:
        """The next of ``request_ids``, going round."""
        ordered = sorted(request_ids)
        later = [i for i in ordered if i > self._after]
        size = min(TURN_MOST, max(TURN_LEAST, -(-len(ordered) // 4)))
        chosen = [*later, *ordered[: len(ordered) - len(later)]][:size]
        if chosen:
            self._after = chosen[-1]
        return chosen

    def observe(self, record: QueuedRecord, sighting: Sighting, now_ms: int) -> bool:
        """Whether a request that has a grace time is to be ended for want of readers."""
        grace_ms = record.leave_grace_ms
        return grace_ms is not None and self._tracker.observe(
            record.request_id,
            sighting,
            accepted_ms=record.created_ms,
            grace_ms=grace_ms,
            now_ms=now_ms,
        )

    def forget(self, request_id: str) -> None:
        """A request is no longer ours, or has been given to a worker."""
        self._tracker.forget(request_id)
