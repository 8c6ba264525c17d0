"""The first scheduling policy: strict classes with ageing, first come first served, least-loaded worker.

Pure: events and ``now`` in, effects out (see :class:`stages.protocols.SchedulingPolicy`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from contracts.tiers import QueueClass
from contracts.worker_events import WorkerEvent
from infra.settings import SchedulerSettings

from .protocols import Dispatch, Effect, Expire, GiveUp, Job

#: A living worker may take this many leases' time to start what it was given (its loop may be busy); a
#: silent one gets one lease.
START_PATIENCE_LEASES = 4

#: Place in a line: when it was queued, then when it came here.
Order = tuple[int, int]


@dataclass(slots=True)
class _Request:
    """A request from its line to its end: waiting, then in flight, perhaps waiting again, then closing.

    Attributes:
        ends_ms: when it is ended if it is waiting then.
        attempts: the highest attempt known to be taken.
        losses: how many workers it has lost.
        returned: whether a worker had it and did not end it.
        worker_id / dispatched_ms / heard_ms: where and since when it is in flight, and when it was last
            known to be alive.
        slots: worker slots it holds.
        shunned: the worker it was lost on; another one is preferred.
    """

    job: Job
    order: Order
    ends_ms: int
    waiting: bool = False
    attempts: int = 0
    losses: int = 0
    returned: bool = False
    worker_id: str = ""
    dispatched_ms: int = 0
    heard_ms: int = 0
    slots: int = 0
    shunned: str = ""


@dataclass(slots=True)
class _Worker:
    """A worker as its events tell it.

    Attributes:
        running: slots taken when it last reported, whoever gave them.
        held: slots of the requests this scheduler has given it and that have not ended.
        given: slots this scheduler has given it since that report.
    """

    slot: int
    worker_id: str
    max_seqs: int = 0
    running: int = 0
    accepting: bool = True
    seen_ms: int = 0
    held: int = 0
    given: int = 0

    @property
    def free(self) -> int:
        """Free slots, as far as its report and our own count tell."""
        return self.max_seqs - max(self.held, self.running + self.given)


@dataclass
class StrictPolicy:
    """Strict class order with ageing.

    Within a pool the next request is the one with the best class, where waiting ``ageing_seconds`` lifts
    a request by one class; among equals the one that was queued first. So within a class the order is that
    of arrival, and a request that was lifted to the first class is older than all that came after it: it
    cannot starve. The next request waits until a worker has room for all its choices; nobody overtakes it.
    The worker is the one with the most free slots.
    """

    settings: SchedulerSettings
    lease_ms: int
    _requests: dict[str, _Request] = field(default_factory=dict)
    _flying: dict[str, _Request] = field(default_factory=dict)
    _lines: dict[str, dict[QueueClass, list[tuple[Order, str]]]] = field(default_factory=dict)
    _waiting: Counter[QueueClass] = field(default_factory=Counter)
    _ends: list[tuple[int, str]] = field(default_factory=list)
    _workers: dict[str, dict[int, _Worker]] = field(default_factory=dict)
    _by_id: dict[str, _Worker] = field(default_factory=dict)
    _arrival: count[int] = field(default_factory=count)

    def queued(self, job: Job, now_ms: int) -> None:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        if job.request_id not in self._requests:
            order = (job.queued_ms, next(self._arrival))
            request = self._requests[job.request_id] = _Request(job, order, job.deadline_ms)
            self._join_line(request)

    def worker_seen(self, pool: str, event: WorkerEvent, now_ms: int) -> None:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        slots = self._workers.setdefault(pool, {})
        worker = slots.get(event.slot)
        if worker is None or worker.worker_id != event.worker_id:
            if worker is not None:
                self._by_id.pop(worker.worker_id, None)
            held = sum(r.slots for r in self._flying.values() if r.worker_id == event.worker_id)
            worker = _Worker(event.slot, event.worker_id, held=held)
            slots[event.slot] = self._by_id[event.worker_id] = worker
        worker.max_seqs = event.max_seqs
        worker.running = event.running
        worker.given = 0
        worker.accepting = event.accepting
        worker.seen_ms = now_ms

    def adopted(self, request_id: str, worker_id: str, attempt: int, now_ms: int) -> None:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        request = self._requests.get(request_id)
        if request is None or not (request.waiting or request_id in self._flying):
            return
        self._leave(request)
        request.attempts = max(request.attempts, attempt)
        self._take_off(request, worker_id, now_ms)

    def orphaned(self, request_id: str, last_attempt: int, now_ms: int) -> None:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        request = self._requests.get(request_id)
        if request is not None and (request.waiting or request_id in self._flying):
            request.attempts = max(request.attempts, last_attempt)
            self._return_to_line(request, now_ms)

    def undelivered(self, request_id: str, now_ms: int) -> None:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        request = self._flying.get(request_id)
        if request is not None:
            self._leave(request)
            self._join_line(request)

    def probed(self, request_id: str, lease_holder: str | None, last_attempt: int, now_ms: int) -> None:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        request = self._flying.get(request_id)
        if request is None:
            return
        if lease_holder is not None:
            request.heard_ms = now_ms
            return
        worker = self._by_id.get(request.worker_id)
        started = last_attempt >= request.attempts
        patience = self.lease_ms
        if not started and worker is not None and self._alive(worker, now_ms):
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
            self._leave(request)

    def decide(self, now_ms: int) -> list[Effect]:
        """See :class:`stages.protocols.SchedulingPolicy`."""
        effects: list[Effect] = []
        while self._ends and self._ends[0][0] <= now_ms:
            ends_ms, request_id = heapq.heappop(self._ends)
            request = self._requests.get(request_id)
            if request is not None and request.waiting and request.ends_ms == ends_ms:
                self._leave(request)
                effects.append(GiveUp(request_id) if request.returned else Expire(request_id))
        for pool in self._lines:
            while (request := self._next(pool, now_ms)) is not None:
                worker = self._choose(pool, request, now_ms)
                if worker is None:
                    break
                self._leave(request)
                request.attempts += 1
                self._take_off(request, worker.worker_id, now_ms)
                effects.append(
                    Dispatch(request.job.request_id, worker.worker_id, worker.slot, request.attempts)
                )
        return effects

    def to_probe(self, now_ms: int) -> list[str]:
        """A lease's time after a request was last heard of; at once while its worker is silent."""
        due: list[str] = []
        for request_id, request in self._flying.items():
            worker = self._by_id.get(request.worker_id)
            silent = worker is None or now_ms - worker.seen_ms > self.lease_ms // 2
            if silent or now_ms - request.heard_ms >= self.lease_ms:
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

    def _join_line(self, request: _Request) -> None:
        job = request.job
        request.waiting = True
        self._waiting[job.queue_class] += 1
        line = self._lines.setdefault(job.pool, {}).setdefault(job.queue_class, [])
        heapq.heappush(line, (request.order, job.request_id))
        heapq.heappush(self._ends, (request.ends_ms, job.request_id))

    def _return_to_line(self, request: _Request, now_ms: int) -> None:
        """Back to its place after it was given to a worker: its deadline to start no longer counts.

        It may wait as long again for another worker, unless it has lost too many.
        """
        self._leave(request)
        job = request.job
        request.returned = True
        request.ends_ms = max(job.deadline_ms, now_ms + max(0, job.deadline_ms - job.queued_ms))
        if request.losses >= self.settings.max_attempts:
            request.ends_ms = now_ms
        self._join_line(request)

    def _leave(self, request: _Request) -> None:
        """Out of the line (its heap entries are skipped later) or out of flight."""
        if request.waiting:
            request.waiting = False
            self._waiting[request.job.queue_class] -= 1
        elif self._flying.pop(request.job.request_id, None) is not None:
            self._free_slots(request)

    def _take_off(self, request: _Request, worker_id: str, now_ms: int) -> None:
        request.worker_id = worker_id
        request.dispatched_ms = request.heard_ms = now_ms
        request.slots = request.job.choices
        worker = self._by_id.get(worker_id)
        if worker is not None:
            worker.held += request.slots
            worker.given += request.slots
        self._flying[request.job.request_id] = request

    def _free_slots(self, request: _Request) -> None:
        worker = self._by_id.get(request.worker_id)
        if worker is not None:
            worker.held -= request.slots
            worker.given = max(0, worker.given - request.slots)
        request.slots = 0

    def _next(self, pool: str, now_ms: int) -> _Request | None:
        """The request of ``pool`` that is served next: best class after ageing, then oldest."""
        best: tuple[tuple[int, Order], _Request] | None = None
        for queue_class, line in self._lines[pool].items():
            request = self._head(line)
            if request is None:
                continue
            waited_ms = max(0, now_ms - request.job.queued_ms)
            lifts = int(waited_ms / (1000 * self.settings.ageing_seconds))
            key = (max(0, queue_class.rank - lifts), request.order)
            if best is None or key < best[0]:
                best = (key, request)
        return best[1] if best is not None else None

    def _head(self, line: list[tuple[Order, str]]) -> _Request | None:
        while line:
            order, request_id = line[0]
            request = self._requests.get(request_id)
            if request is not None and request.waiting and request.order == order:
                return request
            heapq.heappop(line)
        return None

    def _alive(self, worker: _Worker, now_ms: int) -> bool:
        return now_ms - worker.seen_ms <= self.settings.worker_timeout_ms

    def _choose(self, pool: str, request: _Request, now_ms: int) -> _Worker | None:
        """The least-loaded worker with room for all choices (one that it was not lost on, if any)."""
        roomy = [
            w
            for w in self._workers.get(pool, {}).values()
            if w.accepting
            and self._alive(w, now_ms)
            # A worker can be smaller than the request: then the request needs all of it.
            and w.free >= min(request.job.choices, w.max_seqs)
            and w.free > 0
        ]
        return max(roomy, key=lambda w: (w.worker_id != request.shunned, w.free, -w.slot), default=None)
