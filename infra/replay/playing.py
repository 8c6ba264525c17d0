"""One recorded stream being played: what of it is out at a time. Pure; times in monotonic seconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from contracts.entries import StreamEntry, Terminal
from contracts.stream_ids import SEAL, StreamId

from .recordings import TimedEntry


class Playing:
    """Entries that come out at their times, as a token stream does.

    Args:
        entries: in order of ids and of times, the last one a seal (:func:`infra.replay.recordings.mended`).
        began: when the first one is out.
        speed: 1 = as recorded, 2 = twice as fast; None = all at once.
    """

    def __init__(self, entries: Sequence[TimedEntry], began: float, speed: float | None) -> None:
        self._items = [item for _, item in entries]
        self._ids = [item.id for item in self._items]
        self._due = [began + (at_ms / 1000 / speed if speed else 0.0) for at_ms, _ in entries]

    def after(self, cursor: StreamId, now: float, limit: int) -> list[StreamEntry]:
        """Up to ``limit`` entries after ``cursor`` that are out."""
        first = bisect_right(self._ids, cursor)
        return self._items[first : min(self._out(now), first + limit)]

    def due(self, cursor: StreamId) -> float | None:
        """When the first entry after ``cursor`` is out; None where there is none."""
        first = bisect_right(self._ids, cursor)
        return self._due[first] if first < len(self._due) else None

    def last_id(self, now: float) -> StreamId:
        """Id of the last entry that is out."""
        return self._ids[max(0, self._out(now) - 1)]

    def ended(self, now: float) -> bool:
        """Whether all of it is out."""
        return self.last_id(now).is_seal

    def seal(self, terminal: Terminal, now: float) -> bool:
        """End it here; False where it has ended."""
        if self.ended(now):
            return False
        out = self._out(now)
        self._items[out:] = [StreamEntry(SEAL, terminal)]
        self._ids[out:] = [SEAL]
        self._due[out:] = [now]
        return True

    def _out(self, now: float) -> int:
        return bisect_right(self._due, now)
