"""The workers of one pool: who is awake, who has free slots, least loaded first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from itertools import count

from contracts.worker_events import WorkerEvent

from .prefixes import PrefixIndex, TierIndex
from .request import Request
from .worker import Worker

#: Entries that are out of date, per worker, before the order is made anew.
_STALE = 4


class Fleet:
    """Keeps the workers with free slots in order of load, so that nobody looks at all of them.

    A worker is awake while it accepts work and was heard of within ``timeout_ms``.

    Attributes:
        load: what workers are ordered by, lowest first.
        timeout_ms: how long a worker may be silent.
        held / free: slots of the awake workers: those of requests this scheduler gave them, and free ones.
        prefixes: what they have cached.
        tier: what the KV tier that they share has cached.
        to_try: requests that a worker is kept for and that may fit there by now, or have lost it.
    """

    def __init__(self, load: Callable[[Worker], float], scheduler_id: str, timeout_ms: int) -> None:
        self.load = load
        self.timeout_ms = timeout_ms
        self.held = 0
        self.free = 0
        self.prefixes = PrefixIndex()
        self.tier = TierIndex()
        self.to_try: dict[str, None] = {}
        self._scheduler_id = scheduler_id
        self._slots: dict[int, Worker] = {}
        self._by_id: dict[str, Worker] = {}
        self._awake: dict[str, Worker] = {}
        self._order: list[tuple[float, int, int, Worker]] = []
        self._ordered = 0
        self._entries = count(1)

    def get(self, worker_id: str) -> Worker | None:
        """The worker of this id, awake or not, until another one has its slot."""
        return self._by_id.get(worker_id)

    def seen(self, event: WorkerEvent, held: Callable[[str], int], now_ms: int) -> None:
        """A worker's event.

        Args:
            held: slots of the requests in flight at a worker; asked when one is new.
        """
        worker = self._slots.get(event.slot)
        if worker is None or worker.worker_id != event.worker_id:
            if worker is not None:
                self._fall_asleep(worker)
                del self._by_id[worker.worker_id]
                self.prefixes.forget(worker.worker_id)
            worker = Worker(event.slot, event.worker_id, held=held(event.worker_id))
            self._slots[event.slot] = self._by_id[event.worker_id] = worker
        self._fall_asleep(worker, keep=event.accepting)
        worker.report(event, self._scheduler_id, now_ms)
        if event.prefixes or event.prefixes_gone:
            self.prefixes.update(worker.worker_id, event.prefixes, event.prefixes_gone)
        if event.tier_prefixes or event.tier_prefixes_gone:
            self.tier.update(event.tier_prefixes, event.tier_prefixes_gone)
        if worker.accepting:
            self._awake[worker.worker_id] = worker
            self._count(worker, 1)
            self._enter(worker)

    def sleep_silent(self, now_ms: int) -> None:
        """Put those to sleep that were not heard of for too long."""
        while self._awake:
            worker = next(iter(self._awake.values()))
            if now_ms - worker.seen_ms <= self.timeout_ms:
                return
            self._fall_asleep(worker)

    def is_alive(self, worker: Worker, now_ms: int) -> bool:
        """Whether a worker was heard of lately, accepting or not."""
        return now_ms - worker.seen_ms <= self.timeout_ms

    def give(self, worker: Worker, request: Request, uncached: int, now_ms: int) -> None:
        """Count a request that a worker is given, or that is found to run there (``uncached`` = 0)."""
        awake = worker.worker_id in self._awake
        if awake:
            self._count(worker, -1)
        worker.give(request, uncached, now_ms)
        if uncached:
            self.prefixes.expect(worker.worker_id, request.job.prefix_hashes)
            self.tier.expect(request.job.prefix_hashes)
        if awake:
            self._count(worker, 1)
            self._enter(worker)

    def take_back(self, worker: Worker, request: Request) -> None:
        """Count a request that has left a worker."""
        if worker.worker_id not in self._awake:
            worker.take_back(request)
            return
        self._count(worker, -1)
        worker.take_back(request)
        self._count(worker, 1)
        self._enter(worker)

    def finds(self, hashes: Sequence[str]) -> bool:
        """Whether any worker, or the tier, holds a prefix of a prompt."""
        return self.prefixes.longest(hashes) > 0 or self.tier.held_tokens(hashes) > 0

    def has_room(self) -> bool:
        """Whether any worker has a free slot and is not kept for somebody."""
        return self._first() is not None

    def cheapest(self) -> Generator[Worker, None, None]:
        """Workers with free slots that are kept for nobody, lowest load first.

        Nothing may be given or taken while this is not closed.
        """
        taken: list[tuple[float, int, int, Worker]] = []
        try:
            while (worker := self._first()) is not None:
                taken.append(heapq.heappop(self._order))
                yield worker
        finally:
            for item in taken:
                heapq.heappush(self._order, item)

    def awake(self, worker_id: str) -> Worker | None:
        """The worker of this id if it is awake."""
        return self._awake.get(worker_id)

    def keep(self, request: Request, key: Callable[[Worker], tuple[int, ...]]) -> Worker | None:
        """Keep a worker for a request; looks at all of them.

        Args:
            key: what the worker must have least of.

        Returns:
            The worker; None if all are kept already.
        """
        worker = min((w for w in self._awake.values() if not w.kept_for), key=key, default=None)
        if worker is not None:
            worker.kept_for = request.job.request_id
            worker.entry = 0
            self.to_try[request.job.request_id] = None
        return worker

    def keeper(self, request_id: str, worker_id: str) -> Worker | None:
        """The worker that is kept for a request, if it still is."""
        worker = self._awake.get(worker_id)
        return worker if worker is not None and worker.kept_for == request_id else None

    def release(self, request_id: str, worker_id: str) -> None:
        """A request needs its worker no more."""
        worker = self.keeper(request_id, worker_id)
        if worker is not None:
            worker.kept_for = ""
            self._enter(worker)

    def _fall_asleep(self, worker: Worker, *, keep: bool = False) -> None:
        """Out of all counts, and out of the order."""
        if self._awake.pop(worker.worker_id, None) is not None:
            self._count(worker, -1)
        worker.entry = 0
        if worker.kept_for and not keep:
            self.to_try[worker.kept_for] = None
            worker.kept_for = ""

    def _count(self, worker: Worker, sign: int) -> None:
        self.held += sign * worker.held
        if worker.free > 0:
            self.free += sign * worker.free

    def _enter(self, worker: Worker) -> None:
        """Put an awake worker into the order, at its present load; its earlier entry is void."""
        worker.entry = 0
        if worker.kept_for:
            self.to_try[worker.kept_for] = None
        elif worker.free > 0:
            worker.entry = next(self._entries)
            worker.load = self.load(worker)
            heapq.heappush(self._order, (worker.load, worker.slot, worker.entry, worker))
            if len(self._order) > _STALE * len(self._awake) + _STALE:
                self._order = [item for item in self._order if item[3].entry == item[2]]
                heapq.heapify(self._order)

    def _first(self) -> Worker | None:
        while self._order:
            _, _, entry, worker = self._order[0]
            if worker.entry == entry:
                return worker
            heapq.heappop(self._order)
        return None
