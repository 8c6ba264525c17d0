"""The contiguous watermark: which Kafka position may be committed when records finish out of order."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass
class Watermark:
    """Positions of one partition.

    A position is committed only when every record before it has reached its effect, so a crash repeats
    records but never skips one. Gaps in the offsets (compaction, transactions) are no obstacle: what
    counts is what was taken, not what is numbered.
    """

    _open: list[int] = field(default_factory=list)
    _done: set[int] = field(default_factory=set)
    _next: int | None = None
    _committed: int | None = None

    def take(self, offset: int) -> None:
        """A record was handed out. Offsets come in growing order; a repeated one is ignored."""
        if self._next is not None and offset < self._next:
            return
        heapq.heappush(self._open, offset)
        self._next = offset + 1

    def done(self, offset: int) -> None:
        """A record has reached its effect. Idempotent."""
        self._done.add(offset)
        while self._open and self._open[0] in self._done:
            self._done.discard(heapq.heappop(self._open))
        if not self._open:
            self._done.clear()

    @property
    def position(self) -> int | None:
        """The offset to resume from after a crash; None before any record was taken."""
        return self._open[0] if self._open else self._next

    @property
    def in_flight(self) -> int:
        """Records taken and not yet below the watermark."""
        return len(self._open)

    @property
    def last_committed(self) -> int | None:
        """The position that is on the broker, as far as is known here."""
        return self._committed

    def commit_due(self) -> int | None:
        """The position to commit, or None if the last :meth:`committed` one is still right."""
        return self.position if self.position != self._committed else None

    def committed(self, position: int) -> None:
        """Remember that ``position`` is on the broker."""
        self._committed = position
