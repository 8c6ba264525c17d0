"""The life of a request: waiting, in flight, probed, lost, given up; the same for every order."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from contracts.tiers import QueueClass
from contracts.worker_events import WorkerEvent
from infra.settings import SchedulerSettings

from ..protocols import Dispatch, Effect, Expire, GiveUp, Job, Preempt
from .conversations import Change, Conversations
from .fleet import Fleet
from .order import Order
from .placement import Placement
from .request import Request

#: A living worker may take this many leases' time to start what it was given (its loop may be busy); a
#: silent one gets one lease.
START_PATIENCE_LEASES = 4

#: Deadlines that no longer count, besides as many as there are requests, before they are cleared away.
_SPARE = 64


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers of equal models, and who waits for them."""

    fleet: Fleet
    order: Order


class Policy:
    """A :class:`stages.protocols.SchedulingPolicy` with exchangeable order and placement."""

    def __init__(
        self,
        settings: SchedulerSettings,
        lease_ms: int,
        scheduler_id: str,
        placement: Placement,
        make_order: Callable[[Fleet, Placement, SchedulerSettings], Order],
    ) -> None:
        """Make a policy that knows of nothing yet.

        Args:
            lease_ms: how long a worker's lease of a request lasts.
            scheduler_id: whose credits are ours.
            make_order: makes the order of a pool.
        """
        self._settings = settings
        self._lease_ms = lease_ms
        self._scheduler_id = scheduler_id
        self._placement = placement
        self._make_order = make_order
        self._paused: frozenset[QueueClass] = frozenset()
        self._pools: dict[str, Pool] = {}
        self._requests: dict[str, Request] = {}
        self._flying: dict[str, Request] = {}
        self._waiting: Counter[QueueClass] = Counter()
        self._conversations = Conversations()
        self._ends: list[tuple[int, str]] = []
        self._arrivals = count()
        self._now_ms = 0

    def queued(self, job: Job, now_ms: int) -> None:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        if job.request_id not in self._requests:
            request = Request(job, (job.queued_ms, next(self._arrivals)), job.deadline_ms)
            self._requests[job.request_id] = request
            self._wait(request, now_ms)

    def worker_seen(self, pool: str, event: WorkerEvent, now_ms: int) -> None:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        self._pool(pool).fleet.seen(event, self._held_by, now_ms)
        for request_id, tokens in event.generated.items():
            request = self._flying.get(request_id)
            if (
                request is not None
                and request.worker_id == event.worker_id
                and tokens > request.generated
            ):
                more = tokens - request.generated
                request.generated = tokens
                self._pool(pool).order.generated(request, more)

    def adopted(self, request_id: str, worker_id: str, attempt: int, now_ms: int) -> None:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        request = self._open(request_id)
        if request is not None:
            self._leave(request, now_ms, flies=True)
            request.attempts = max(request.attempts, attempt)
            self._take_off(request, worker_id, 0, now_ms)

    def orphaned(self, request_id: str, last_attempt: int, now_ms: int) -> None:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        request = self._open(request_id)
        if request is not None:
            request.attempts = max(request.attempts, last_attempt)
            self._return_to_line(request, now_ms)

    def undelivered(self, request_id: str, now_ms: int) -> None:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        request = self._flying.get(request_id)
        if request is not None:
            self._leave(request, now_ms)
            self._wait(request, now_ms)

    def probed(self, request_id: str, lease_holder: str | None, last_attempt: int, now_ms: int) -> None:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        request = self._flying.get(request_id)
        if request is None:
            return
        if lease_holder is not None:
            request.heard_ms = now_ms
            return
        fleet = self._pool(request.job.pool).fleet
        worker = fleet.get(request.worker_id)
        started = last_attempt >= request.attempts
        patience = self._lease_ms
        if not started and worker is not None and fleet.is_alive(worker, now_ms):
            patience *= START_PATIENCE_LEASES
        if now_ms - request.dispatched_ms < patience:
            return
        request.attempts = max(request.attempts, last_attempt)
        # Only who has begun can have been killed by the request: a worker that was frozen before is no proof.
        request.losses += started
        request.shunned = request.worker_id
        self._return_to_line(request, now_ms)

    def ended(self, request_id: str) -> None:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._leave(request, self._now_ms)

    def decide(self, now_ms: int) -> list[Effect]:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        self._now_ms = now_ms
        effects: list[Effect] = []
        while self._ends and self._ends[0][0] <= now_ms:
            ends_ms, request_id = heapq.heappop(self._ends)
            if self._ends_at(request_id) == ends_ms:
                request = self._requests[request_id]
                self._leave(request, now_ms)
                effects.append(GiveUp(request_id) if request.returned else Expire(request_id))
        for pool in self._pools.values():
            pool.fleet.sleep_silent(now_ms)
            while (chosen := pool.order.next(now_ms)) is not None:
                request, seat = chosen
                self._leave(request, now_ms, flies=True)
                request.attempts += 1
                self._take_off(request, seat.worker.worker_id, seat.uncached, now_ms)
                effects.append(
                    Dispatch(
                        request.job.request_id,
                        seat.worker.worker_id,
                        seat.worker.slot,
                        request.attempts,
                        seat.held,
                        seat.loaded,
                    )
                )
            for request, worker in pool.order.preempt(now_ms):
                effects.append(Preempt(request.job.request_id, worker.worker_id, worker.slot))
        return effects

    def to_probe(self, now_ms: int) -> list[str]:
        """A lease's time after a request was last heard of; at once while its worker is silent."""
        due: list[str] = []
        for request_id, request in self._flying.items():
            worker = self._pools[request.job.pool].fleet.get(request.worker_id)
            silent = worker is None or now_ms - worker.seen_ms > self._lease_ms // 2
            if silent or now_ms - request.heard_ms >= self._lease_ms:
                due.append(request_id)
        return due

    def waiting(self) -> dict[QueueClass, int]:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        return {c: self._waiting[c] for c in QueueClass}

    def is_waiting(self, request_id: str) -> bool:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        request = self._requests.get(request_id)
        return request is not None and request.waiting

    def in_flight(self) -> int:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        return len(self._flying)

    def pause(self, classes: frozenset[QueueClass]) -> None:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        self._paused = classes
        for pool in self._pools.values():
            pool.order.pause(classes)

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        self._settings = settings
        self._placement.reconfigure(settings)
        for pool in self._pools.values():
            pool.fleet.timeout_ms = settings.worker_timeout_ms
            pool.order.reconfigure(settings)

    def _pool(self, name: str) -> Pool:
        pool = self._pools.get(name)
        if pool is None:
            fleet = Fleet(self._placement.load, self._scheduler_id, self._settings.worker_timeout_ms)
            order = self._make_order(fleet, self._placement, self._settings)
            order.pause(self._paused)
            pool = self._pools[name] = Pool(fleet, order)
        return pool

    def _held_by(self, worker_id: str) -> int:
        return sum(r.slots for r in self._flying.values() if r.worker_id == worker_id)

    def _open(self, request_id: str) -> Request | None:
        """A request that waits or is in flight, and is not being ended."""
        request = self._requests.get(request_id)
        return request if request is not None and (request.waiting or request.slots) else None

    def _wait(self, request: Request, now_ms: int) -> None:
        request.waiting = True
        self._waiting[request.job.queue_class] += 1
        heapq.heappush(self._ends, (request.ends_ms, request.job.request_id))
        if len(self._ends) > 2 * len(self._requests) + _SPARE:
            # Those of requests that have ended long before their deadlines.
            self._ends = [e for e in self._ends if self._ends_at(e[1]) == e[0]]
            heapq.heapify(self._ends)
        self._line_up(self._conversations.waits(request), now_ms)

    def _ends_at(self, request_id: str) -> int | None:
        request = self._requests.get(request_id)
        return request.ends_ms if request is not None and request.waiting else None

    def _return_to_line(self, request: Request, now_ms: int) -> None:
        """Back to its place after it was given to a worker: its deadline to start no longer counts.

        It may wait as long again for another worker, unless it has lost too many.
        """
        self._leave(request, now_ms)
        job = request.job
        request.returned = True
        request.ends_ms = max(job.deadline_ms, now_ms + max(0, job.deadline_ms - job.queued_ms))
        if request.losses >= self._settings.max_attempts:
            request.ends_ms = now_ms
        self._wait(request, now_ms)

    def _leave(self, request: Request, now_ms: int, *, flies: bool = False) -> None:
        """Out of the line, or out of flight.

        Args:
            flies: it takes off right afterwards.
        """
        if request.waiting:
            request.waiting = False
            self._waiting[request.job.queue_class] -= 1
            self._line_up(self._conversations.leaves(request, flies=flies), now_ms)
        elif self._flying.pop(request.job.request_id, None) is not None:
            pool = self._pools[request.job.pool]
            worker = pool.fleet.get(request.worker_id)
            if worker is not None:
                pool.fleet.take_back(worker, request)
            pool.order.stopped(request)
            request.slots = 0
            if not flies:
                self._line_up(self._conversations.landed(request), now_ms)

    def _line_up(self, change: Change, now_ms: int) -> None:
        """Let the order see who may be served now, and no longer."""
        for request, in_line in ((change.may_not, False), (change.may, True)):
            if request is not None and request.in_line != in_line:
                request.in_line = in_line
                order = self._pool(request.job.pool).order
                if in_line:
                    order.join(request, now_ms)
                else:
                    order.leave(request)

    def _take_off(self, request: Request, worker_id: str, uncached: int, now_ms: int) -> None:
        """A request is at a worker from now on.

        Args:
            uncached: prompt tokens it has to prefill there; 0 if it runs there already.
        """
        request.worker_id = worker_id
        request.dispatched_ms = request.heard_ms = now_ms
        request.slots = request.job.choices
        pool = self._pool(request.job.pool)
        worker = pool.fleet.get(worker_id)
        if worker is not None:
            pool.fleet.give(worker, request, uncached, now_ms)
        self._flying[request.job.request_id] = request
        pool.order.started(request)
