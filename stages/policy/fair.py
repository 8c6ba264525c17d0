"""The default order: weighted shares between classes, fairness between tenants, bounded waiting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from contracts.tiers import QueueClass
from infra.settings import SchedulerSettings

from .class_line import ClassLine, Option, lifts
from .counters import VirtualCounters
from .fleet import Fleet
from .placement import Placement, Seat, least_missing
from .preemption import GIVER, TAKER, Preemption
from .request import Request
from .worker import Worker

#: What a token costs: of a prompt, and of a reply (arXiv 2401.00588, section 3: they take longer).
INPUT_COST = 1.0
OUTPUT_COST = 2.0

#: One in so many dispatches in the turn of a class may go to a class that ageing has lifted to it.
GUEST_EVERY = 8
#: A request that is next and fits nowhere for so long has a worker kept for it.
KEEP_AFTER_MS = 1_000


class FairOrder:
    """See docs/SCHEDULING.md, and :class:`stages.policy.order.Order`."""

    def __init__(self, fleet: Fleet, placement: Placement, settings: SchedulerSettings) -> None:
        self._fleet = fleet
        self._placement = placement
        self._settings = settings
        self._lines = {c: ClassLine(c, settings) for c in QueueClass}
        self._paused: frozenset[QueueClass] = frozenset()
        self._shares: VirtualCounters[QueueClass] = VirtualCounters(
            lambda c: self._settings.class_weights.get(c, 1.0)
        )
        self._held = dict.fromkeys(QueueClass, 0)
        self._keeping: dict[str, Request] = {}
        self._preemption = Preemption(settings)

    def join(self, request: Request, now_ms: int) -> None:
        """See :class:`stages.policy.order.Order`."""
        queue_class = request.job.queue_class
        self._lines[queue_class].join(request, now_ms)
        if queue_class not in self._paused:
            self._shares.activate(queue_class)
        self._preemption.joins(request)

    def leave(self, request: Request) -> None:
        """See :class:`stages.policy.order.Order`."""
        queue_class = request.job.queue_class
        line = self._lines[queue_class]
        line.leave(request)
        if not line:
            self._shares.deactivate(queue_class)
        self._preemption.leaves(request)
        request.blocked_ms = 0
        self._unkeep(request)

    def started(self, request: Request) -> None:
        """See :class:`stages.policy.order.Order`."""
        queue_class = request.job.queue_class
        self._held[queue_class] += request.slots
        self._lines[queue_class].takes_off(request)
        request.borrowed = queue_class is GIVER and not self._lines[TAKER]
        self._preemption.takes_off(request)
        if not request.charged:
            request.charged = True
            self._charge(request, INPUT_COST * max(1, request.job.prompt_tokens))

    def generated(self, request: Request, tokens: int) -> None:
        """See :class:`stages.policy.order.Order`."""
        self._charge(request, OUTPUT_COST * tokens)

    def stopped(self, request: Request) -> None:
        """See :class:`stages.policy.order.Order`."""
        queue_class = request.job.queue_class
        self._held[queue_class] -= request.slots
        self._lines[queue_class].lands(request)
        self._preemption.lands(request)

    def pause(self, classes: frozenset[QueueClass]) -> None:
        """See :class:`stages.policy.order.Order`. A paused class earns nothing meanwhile."""
        self._paused = classes
        self._fleet.to_try.update(dict.fromkeys(self._keeping))
        for queue_class, line in self._lines.items():
            if queue_class in classes:
                self._shares.deactivate(queue_class)
            elif line:
                self._shares.activate(queue_class)

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """See :class:`stages.policy.order.Order`."""
        self._settings = settings
        self._fleet.to_try.update(dict.fromkeys(self._keeping))
        self._preemption.reconfigure(settings)
        for line in self._lines.values():
            line.reconfigure(settings)

    def preempt(self, now_ms: int) -> list[tuple[Request, Worker]]:
        """See :class:`stages.policy.order.Order`."""
        self._preemption.look_at_clock(now_ms)
        if TAKER in self._paused:
            return []
        chosen = list(self._cleared(now_ms)) if self._keeping else []
        if not self._fleet.has_room():
            chosen += self._preemption.choose(self._fleet)
        return chosen

    def next(self, now_ms: int) -> tuple[Request, Seat] | None:
        """See :class:`stages.policy.order.Order`."""
        while self._fleet.to_try:
            kept = self._keeping.get(self._fleet.to_try.popitem()[0])
            if kept is None:
                continue
            if self._fleet.keeper(kept.job.request_id, kept.kept) is None:
                self._unkeep(kept)
            elif kept.job.queue_class not in self._paused and (seat := self._seat(kept)):
                return kept, seat
        if not self._fleet.has_room():
            return None
        blocked: list[Request] = []
        tried: list[tuple[int, int, int]] = []
        for line, options in self._in_turn(now_ms):
            if any(self._lines[r.job.queue_class].barred(r) for r in blocked):
                return None
            ahead = len(blocked)
            for option in options:
                request = option.request
                if request.kept or not self._may_take(request):
                    continue
                hopeless = self._is_hopeless(request, tried)
                seat = None if hopeless else self._seat(request)
                if seat is not None:
                    self._passes((*blocked[:ahead], *option.passed))
                    request.turn = line.queue_class
                    is_guest = request.job.queue_class is not line.queue_class
                    line.since_guest = 0 if is_guest else line.since_guest + 1
                    return request, seat
                if not hopeless:
                    tried.append(_size(request))
                if request.job.queue_class is not line.queue_class:
                    continue  # It is looked at again in the turn of its own class.
                if line.barred(request) or all(passed.kept for passed in option.passed):
                    blocked.append(request)
                    self._is_blocked(request, now_ms)
        return None

    def _cleared(self, now_ms: int) -> Iterator[tuple[Request, Worker]]:
        """Who makes room where a worker is kept for an interactive request that lacks slots or KV room.

        It does not lack them for long if only prompts are before it: those are prefilled soon.
        """
        for request in self._keeping.values():
            if request.job.queue_class is not TAKER or not self._preemption.may_clear(request, now_ms):
                continue
            worker = self._fleet.keeper(request.job.request_id, request.kept)
            if worker is None:
                continue
            slots, _, kv, _ = least_missing(request, worker)
            if slots or kv:
                for giver in self._preemption.clear(request, worker, max(1, slots), now_ms):
                    yield giver, worker

    def _passes(self, passed: Iterable[Request]) -> None:
        for request in passed:
            if not request.kept:
                request.overtaken += 1

    def _in_turn(self, now_ms: int) -> Iterator[tuple[ClassLine, Iterator[Option]]]:
        """The lines that may be served, the one with the lowest counter first, and whom they offer."""
        classes = self._shares.first(len(self._lines))
        if self._preemption.is_owed() and TAKER in classes:
            classes.remove(TAKER)
            classes.insert(0, TAKER)
        for queue_class in classes:
            line = self._lines[queue_class]
            guest = self._guest(line, now_ms)
            if guest is not None:
                yield line, guest.options(self._fleet.prefixes)
            yield line, line.options(self._fleet.prefixes)

    def _guest(self, line: ClassLine, now_ms: int) -> ClassLine | None:
        """The lower class whose oldest request ageing has lifted to this one, if it is a guest's turn."""
        if line.since_guest < GUEST_EVERY:
            return None
        oldest = [
            (head.place, lower)
            for lower in self._lines.values()
            if lower.rank > line.rank
            and (head := lower.oldest()) is not None
            and lower.queue_class not in self._paused
            and lower.rank - lifts(head, self._settings, now_ms) <= line.rank
        ]
        return min(oldest, key=lambda found: found[0])[1] if oldest else None

    def _may_take(self, request: Request) -> bool:
        """Whether its class may take more slots: all classes below one with a reservation leave it free."""
        rank, choices = self._lines[request.job.queue_class].rank, request.job.choices
        slots = self._fleet.held + self._fleet.free
        reserved, below = 0, sum(self._held.values())
        for queue_class, line in self._lines.items():
            if line.rank >= rank:
                break
            reserved += int(slots * self._settings.reserved_slots.get(queue_class, 0.0))
            below -= self._held[queue_class]
            most = slots - min(reserved, slots - 1)
            # Who needs more than the classes below may ever have would wait for ever.
            if choices <= most < below + choices:
                return False
        return True

    def _is_hopeless(self, request: Request, tried: list[tuple[int, int, int]]) -> bool:
        """Whether one that needs no more of anything has found no place just now."""
        if not tried or self._fleet.finds(request.job.prefix_hashes):
            return False
        choices, prompt, tokens = _size(request)
        return any(c <= choices and p <= prompt and t <= tokens for c, p, t in tried)

    def _seat(self, request: Request) -> Seat | None:
        return self._placement.choose(self._fleet, request)

    def _is_blocked(self, request: Request, now_ms: int) -> None:
        """It is next and fits nowhere: after a while, or when nobody may pass it, keep a worker for it."""
        request.blocked_ms = request.blocked_ms or now_ms
        waited_ms = now_ms - request.blocked_ms
        barred = self._lines[request.job.queue_class].barred(request)
        if (barred or waited_ms >= KEEP_AFTER_MS) and (
            worker := self._fleet.keep(request, lambda w: least_missing(request, w))
        ):
            request.kept = worker.worker_id
            self._keeping[request.job.request_id] = request
            self._preemption.leaves(request)

    def _unkeep(self, request: Request) -> None:
        if request.kept:
            self._fleet.release(request.job.request_id, request.kept)
            request.kept = ""
            request.cleared_ms = 0
            del self._keeping[request.job.request_id]
            if request.in_line:
                self._preemption.joins(request)

    def _charge(self, request: Request, cost: float) -> None:
        self._shares.charge(request.turn or request.job.queue_class, cost)
        self._lines[request.job.queue_class].charge(request.job.tenant, cost)


def _size(request: Request) -> tuple[int, int, int]:
    """What decides whether it fits, but for cached prefixes."""
    job = request.job
    return job.choices, job.prompt_tokens, job.prompt_tokens + job.output_tokens
