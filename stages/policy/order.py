"""The seam between the life of requests and the order they are served in; the two simplest orders."""

from __future__ import annotations

from typing import Protocol

from contracts.tiers import QueueClass
from infra.settings import SchedulerSettings

from .fleet import Fleet
from .line import Line
from .placement import Placement, Seat
from .request import Request
from .worker import Worker


class Order(Protocol):
    """Who of the waiting requests of one pool is served next. No clock, no I/O, no randomness."""

    def join(self, request: Request, now_ms: int) -> None:
        """A request stands in the line from now on; it may have stood there before."""

    def leave(self, request: Request) -> None:
        """A request that stands in the line leaves it."""

    def next(self, now_ms: int) -> tuple[Request, Seat] | None:
        """Who is served next, and where; None while nobody who may be served has a place.

        Who is chosen still stands in the line; the caller takes it out and starts it.
        """

    def preempt(self, now_ms: int) -> list[tuple[Request, Worker]]:
        """Requests in flight that are to give up their slots now, and where they run.

        Each is named once per preemption.
        """

    def started(self, request: Request) -> None:
        """A request that has left the line was given to a worker."""

    def generated(self, request: Request, tokens: int) -> None:
        """A request in flight has so many more output tokens."""

    def stopped(self, request: Request) -> None:
        """A request that was started, or was found to run, is no longer in flight."""

    def pause(self, classes: frozenset[QueueClass]) -> None:
        """Nobody of these classes is served."""

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """These settings from now on."""


class FirstComeFirstServed:
    """The oldest first, whatever its class. Nobody passes who waits for room. A baseline."""

    def __init__(self, fleet: Fleet, placement: Placement, settings: SchedulerSettings) -> None:
        self._fleet = fleet
        self._placement = placement
        self._lines = {c: Line() for c in QueueClass}
        self._paused: frozenset[QueueClass] = frozenset()

    def join(self, request: Request, now_ms: int) -> None:
        """See :class:`Order`."""
        self._lines[request.job.queue_class].add(request)

    def leave(self, request: Request) -> None:
        """See :class:`Order`."""
        self._lines[request.job.queue_class].remove(request)

    def next(self, now_ms: int) -> tuple[Request, Seat] | None:
        """See :class:`Order`."""
        if not self._fleet.has_room():
            return None
        heads = [line.head() for c, line in self._lines.items() if c not in self._paused]
        request = self.first([head for head in heads if head is not None])
        if request is None:
            return None
        seat = self._placement.choose(self._fleet, request)
        return (request, seat) if seat is not None else None

    def preempt(self, now_ms: int) -> list[tuple[Request, Worker]]:
        """See :class:`Order`."""
        return []

    def first(self, heads: list[Request]) -> Request | None:
        """Which of the oldest requests of each class, highest class first, is next."""
        return min(heads, key=lambda r: r.place, default=None)

    def started(self, request: Request) -> None:
        """See :class:`Order`."""

    def generated(self, request: Request, tokens: int) -> None:
        """See :class:`Order`."""

    def stopped(self, request: Request) -> None:
        """See :class:`Order`."""

    def pause(self, classes: frozenset[QueueClass]) -> None:
        """See :class:`Order`."""
        self._paused = classes

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """See :class:`Order`."""


class StrictPriority(FirstComeFirstServed):
    """The highest class first, then the oldest: vLLM's own ``priority`` scheduling. A baseline.

    Lower classes starve for as long as a higher one has enough to fill the workers.
    """

    def first(self, heads: list[Request]) -> Request | None:
        """See :class:`FirstComeFirstServed`."""
        return heads[0] if heads else None
