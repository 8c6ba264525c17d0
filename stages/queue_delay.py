"""How long requests wait for a worker, per pool and tier, as the overload ladder looks at it. No I/O."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

#: Dispatched requests of one pool and tier that are remembered at most.
_REMEMBERED = 2_048


@dataclass(frozen=True, slots=True)
class _Waiting:
    pool: str
    tier: str
    since_ms: int


@dataclass
class QueueDelays:
    """Waiting times of requests on their way to their first worker. Times are Unix milliseconds."""

    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _waited: dict[tuple[str, str], deque[tuple[int, float]]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_REMEMBERED))
    )

    def joined(self, request_id: str, pool: str, tier: str, since_ms: int) -> None:
        """A request came into the line, where it has waited since ``since_ms``."""
        self._waiting[request_id] = _Waiting(pool, tier, since_ms)

    def dispatched(self, request_id: str, now_ms: int) -> None:
        """A request went to a worker; what it waits for after that is no queue delay."""
        found = self._waiting.pop(request_id, None)
        if found is not None:
            seconds = max(0, now_ms - found.since_ms) / 1000
            self._waited[found.pool, found.tier].append((now_ms, seconds))

    def left(self, request_id: str) -> None:
        """A request is gone from the line, however."""
        self._waiting.pop(request_id, None)

    def measure(
        self,
        now_ms: int,
        window_seconds: float,
        percentile: float,
        is_waiting: Callable[[str], bool] = lambda _: True,
    ) -> dict[str, dict[str, float]]:
        """The queue delay of each pool and tier in seconds; those without any request are absent.

        It is the ``percentile`` (nearest rank) of what the requests dispatched within the window have waited
        and the waiting ones have waited so far. So it shows a standstill, in which nothing is dispatched, and
        one odd request among many does not move it.

        Args:
            is_waiting: whether a request stands in the line now (a scheduler may come upon requests that
                another one has dispatched).
        """
        oldest_ms = now_ms - int(window_seconds * 1000)
        samples: dict[tuple[str, str], list[float]] = defaultdict(list)
        for key, waited in list(self._waited.items()):
            while waited and waited[0][0] <= oldest_ms:
                waited.popleft()
            if waited:
                samples[key].extend(seconds for _, seconds in waited)
            else:
                del self._waited[key]
        for request_id, waiting in self._waiting.items():
            if is_waiting(request_id):
                seconds = max(0, now_ms - waiting.since_ms) / 1000
                samples[waiting.pool, waiting.tier].append(seconds)
        delays: dict[str, dict[str, float]] = defaultdict(dict)
        for (pool, tier), values in samples.items():
            values.sort()
            delays[pool][tier] = values[math.ceil(percentile * len(values)) - 1]
        return dict(delays)
