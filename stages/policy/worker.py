"""A worker as its events and our own dispatches tell it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from contracts.worker_events import WorkerEvent

from .request import Request

#: A dispatch reaches its worker and shows in what it reports after at most this time, as a rule.
ARRIVAL_MS = 50


@dataclass(slots=True, eq=False)
class Worker:
    """Capacity and load of one worker.

    Attributes:
        running: slots taken when it last reported, whoever gave them.
        granted: free slots it granted this scheduler at that report; None = whatever is free.
        kv_total / kv_free: tokens, at that report; 0 total = unknown.
        prefilling: prompt tokens it had taken and not yet prefilled at that report.
        held: slots of the requests this scheduler has given it and that have not ended.
        untaken: slots of the requests this scheduler has given it, by id, as far as that report does not
            show them: an event may cross dispatches on its way.
        given: their sum.
        given_kv / given_prefill: tokens of KV room and prompt tokens that are not cached, which this
            scheduler has given it since that report.
        recent: when and how many prompt tokens it was given, as far as its report may not show them.
        free: free slots, as far as its report, its grant and our own count tell.
        ahead: prompt tokens that are prefilled before those of a request that it is given now. An event
            that crossed a dispatch on its way does not show it yet, so ``recent`` counts at least.
        load_ratio: what it takes to load a token from the KV tier, in tokens to prefill; 1 = as long as
            that, or longer, or not known: it gains nothing from the tier.
        load: what the fleet orders it by, as of its entry there.
        kept_for: the request it takes next, before which it takes nothing else; empty = none.
        entry: its valid entry in the order of the fleet; 0 = none.
    """

    slot: int
    worker_id: str
    max_seqs: int = 0
    running: int = 0
    granted: int | None = None
    kv_total: int = 0
    kv_free: int = 0
    prefilling: int = 0
    accepting: bool = True
    seen_ms: int = 0
    held: int = 0
    untaken: dict[str, int] = field(default_factory=dict)
    given: int = 0
    given_kv: int = 0
    given_prefill: int = 0
    recent: deque[tuple[int, int]] = field(default_factory=deque)
    free: int = 0
    ahead: int = 0
    load_ratio: float = 1.0
    load: float = 0.0
    kept_for: str = ""
    entry: int = 0

    def report(self, event: WorkerEvent, scheduler_id: str, now_ms: int) -> None:
        """Take over what an event says."""
        self.max_seqs = event.max_seqs
        self.running = event.running
        self.granted = event.credits.get(scheduler_id, 0) if event.credits else None
        self.kv_total = event.kv_tokens_total
        self.kv_free = event.kv_tokens_free
        self.prefilling = event.prefill_tokens
        self.accepting = event.accepting
        self.seen_ms = now_ms
        self.load_ratio = _load_ratio(event)
        self.given_kv = self.given_prefill = 0
        if self.granted is None:
            self.untaken.clear()  # A worker that grants nothing may not say either what it has taken.
        for request_id in (*event.taken, *event.generated):
            self.untaken.pop(request_id, None)
        self.given = sum(self.untaken.values())
        while self.recent and self.recent[0][0] <= now_ms - ARRIVAL_MS:
            self.recent.popleft()
        self._reckon()

    def give(self, request: Request, uncached: int, now_ms: int) -> None:
        """Count a request that it is given.

        Args:
            uncached: prompt tokens it has to prefill; 0 for one that is found to run already.
        """
        self.held += request.slots
        if uncached:
            self.untaken[request.job.request_id] = request.slots
            self.given += request.slots
            self.given_kv += kv_need(request)
            self.given_prefill += uncached
            self.recent.append((now_ms, uncached))
        self._reckon()

    def take_back(self, request: Request) -> None:
        """Count a request that has left it."""
        self.held -= request.slots
        self.given -= self.untaken.pop(request.job.request_id, 0)
        self._reckon()

    @property
    def idle(self) -> bool:
        """Nothing runs there."""
        return self.held == 0 and self.running + self.given == 0

    def _reckon(self) -> None:
        free = self.max_seqs - max(self.held, self.running + self.given)
        self.free = free if self.granted is None else min(free, self.granted - self.given)
        ahead = self.prefilling + self.given_prefill
        if self.recent:
            ahead = max(ahead, sum(tokens for _, tokens in self.recent))
        self.ahead = ahead


def _load_ratio(event: WorkerEvent) -> float:
    load, prefill = event.load_us_per_token, event.prefill_us_per_token
    if load is None or prefill is None or not (load > 0 and prefill > 0):
        return 1.0
    return min(1.0, load / prefill)


def kv_need(request: Request) -> int:
    """Tokens of KV room that a request may come to need."""
    return request.job.prompt_tokens + request.job.output_tokens


def slots_need(request: Request, worker: Worker) -> int:
    """Free slots a request needs: one per choice, but no more than there are."""
    return min(request.job.choices, worker.max_seqs)
