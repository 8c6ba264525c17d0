"""When a request is ended because all its readers have left. Pure: sightings and ``now`` in, a verdict out.

Who reads a request says so in advance and for a short time (it *vouches*), and says when its last reader
leaves. So a departure is known at once, while a reader that fell silent is missed only for a while: it may
be the store, or we, that was away. Such an absence must be seen for :data:`SETTLE_MS` before it counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: How long an absence that nobody announced must be watched, without a break, before it counts.
SETTLE_MS = 3_000


@dataclass(frozen=True, slots=True)
class Sighting:
    """What is known of a request's readers, in Unix milliseconds of one common clock.

    Attributes:
        vouched_until_ms: until when somebody promised to be reading; 0 = never.
        left_ms: when a last reader left; 0 = never.
    """

    vouched_until_ms: int = 0
    left_ms: int = 0


NOBODY = Sighting()


@dataclass(frozen=True, slots=True)
class _Silence:
    """An absence nobody announced, as this watcher has seen it without a break."""

    since_ms: int
    last_ms: int


@dataclass
class AbsenceTracker:
    """The requests one process watches. The time before the first reader counts as absence."""

    _silences: dict[str, _Silence] = field(default_factory=dict)

    def observe(
        self, request_id: str, sighting: Sighting, *, accepted_ms: int, grace_ms: int, now_ms: int
    ) -> bool:
        """Whether the request is to be ended: without readers for its grace time.

        Args:
            accepted_ms: acceptance of the request, Unix milliseconds.
            grace_ms: how long it may be without a reader.
            now_ms: Unix milliseconds, by the clock of the sighting.
        """
        if sighting.vouched_until_ms > now_ms:
            self._silences.pop(request_id, None)
            return False
        last_present = max(sighting.vouched_until_ms, sighting.left_ms, accepted_ms)
        waited = now_ms - last_present >= grace_ms
        if sighting.left_ms and sighting.left_ms >= sighting.vouched_until_ms:
            self._silences.pop(request_id, None)
            return waited
        known = self._silences.get(request_id)
        unbroken = known is not None and 0 <= now_ms - known.last_ms <= SETTLE_MS
        since = known.since_ms if known is not None and unbroken else now_ms
        self._silences[request_id] = _Silence(since, now_ms)
        return waited and now_ms - since >= SETTLE_MS

    def forget(self, request_id: str) -> None:
        """The request is no longer watched here."""
        self._silences.pop(request_id, None)

    @property
    def watched(self) -> int:
        """Absences being watched: none is kept of a request that was forgotten."""
        return len(self._silences)
