"""Who gives up its slot for an interactive request that waits too long."""

from __future__ import annotations

import heapq
from itertools import count

from contracts.tiers import QueueClass
from infra.settings import SchedulerSettings

from .fleet import Fleet
from .request import Place, Request
from .worker import Worker

#: Who may take a slot back, and from whom.
TAKER = QueueClass.INTERACTIVE
GIVER = QueueClass.BATCH

#: At a worker that is kept for somebody, in steps: by then its report shows what those before have left.
CLEAR_EVERY_MS = 1_000

#: Entries that are out of date, besides as many as are not, before they are cleared away.
_SPARE = 64


class Preemption:
    """Batch replies give borrowed slots back, those with the least work done first.

    A slot is borrowed if no interactive request waited when it was given. Others are batch's own share:
    taking those as well would leave batch nothing while interactive load lasts, and have the same replies
    start over and over.

    Attributes:
        owed: slots that were given back and not yet taken by an interactive request.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self.owed = 0
        self._settings = settings
        self._due: list[tuple[int, Place, Request]] = []
        self._overdue: dict[str, Request] = {}
        self._needed = 0
        self._pending = 0
        self._givers: list[tuple[int, int, Request]] = []
        self._entries: dict[str, int] = {}
        self._numbers = count()

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """These settings from now on; who waits already becomes due as before."""
        self._settings = settings

    def joins(self, request: Request) -> None:
        """A request waits, and any worker will do."""
        if request.job.queue_class is TAKER:
            due_ms = request.job.queued_ms + self._settings.preempt_after_ms
            heapq.heappush(self._due, (due_ms, request.place, request))

    def leaves(self, request: Request) -> None:
        """A request waits no more, or only for the worker that is kept for it."""
        if self._overdue.pop(request.job.request_id, None) is not None:
            self._needed -= request.job.choices

    def takes_off(self, request: Request) -> None:
        """A request was given slots."""
        if request.job.queue_class is TAKER:
            self.owed = max(0, self.owed - request.slots)
        elif self._may_give(request):
            entry = self._entries[request.job.request_id] = next(self._numbers)
            heapq.heappush(self._givers, (request.tokens, entry, request))
            if len(self._givers) > 2 * len(self._entries) + _SPARE:
                self._givers = [
                    g for g in self._givers if self._entries.get(g[2].job.request_id) == g[1]
                ]
                heapq.heapify(self._givers)

    def lands(self, request: Request) -> None:
        """A request is no longer in flight."""
        self._entries.pop(request.job.request_id, None)
        if request.preempting:
            request.preempting = False
            self._pending -= request.slots
            self.owed += request.slots

    def is_owed(self) -> bool:
        """Whether an interactive request comes first: a slot was given back for one that still waits."""
        if not self._overdue:
            self.owed = 0
        return self.owed > 0

    def look_at_clock(self, now_ms: int) -> None:
        """Note who has waited too long by now."""
        while self._due and self._due[0][0] <= now_ms:
            request = heapq.heappop(self._due)[2]
            if request.in_line and not request.kept and request.job.request_id not in self._overdue:
                self._overdue[request.job.request_id] = request
                self._needed += request.job.choices

    def choose(self, fleet: Fleet) -> list[tuple[Request, Worker]]:
        """Who is to give up its slots now, and where it runs. Call it when no slot is free."""
        chosen: list[tuple[Request, Worker]] = []
        while self._needed > self._pending + self.owed and (giver := self._least_work()) is not None:
            worker = fleet.awake(giver.worker_id)
            if worker is None:
                continue  # Lost already; its lease will tell.
            giver.preempting = True
            giver.preemptions += 1
            self._pending += giver.slots
            chosen.append((giver, worker))
        return chosen

    def may_clear(self, taker: Request, now_ms: int) -> bool:
        """Whether an interactive request has waited long enough for its worker to be cleared (again)."""
        wait_ms = self._settings.preempt_after_ms
        return now_ms >= max(taker.job.queued_ms + wait_ms, taker.cleared_ms + CLEAR_EVERY_MS)

    def clear(self, taker: Request, worker: Worker, most: int, now_ms: int) -> list[Request]:
        """Who is to make room at the worker that is kept for an interactive request; looks at all who may."""
        taker.cleared_ms = now_ms
        here = (
            giver
            for _, entry, giver in self._givers
            if giver.worker_id == worker.worker_id and self._entries.get(giver.job.request_id) == entry
        )
        givers = heapq.nsmallest(most, here, key=lambda g: g.tokens)
        for giver in givers:
            giver.preemptions += 1
            del self._entries[giver.job.request_id]
        return givers

    def _may_give(self, request: Request) -> bool:
        most = self._settings.max_preemptions
        return request.borrowed and request.job.continues and request.preemptions < most

    def _least_work(self) -> Request | None:
        """Take out the one with the fewest tokens. Tokens only grow, so entries are corrected on top."""
        givers = self._givers
        while givers:
            tokens, entry, request = givers[0]
            if self._entries.get(request.job.request_id) != entry:
                heapq.heappop(givers)
            elif tokens < request.tokens:
                heapq.heapreplace(givers, (request.tokens, entry, request))
            else:
                heapq.heappop(givers)
                del self._entries[request.job.request_id]
                return request
        return None
