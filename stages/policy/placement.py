"""Where a request goes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from infra.settings import SchedulerSettings

from .fleet import Fleet
from .request import Request
from .worker import Worker, kv_need, slots_need

#: Workers that are looked at for one request: so many of the least loaded, and of those with its prefix.
LOOKED_AT = 4
#: What a worker with all slots taken costs a first token more than an empty one, seconds: its steps are
#: longer, and the prefill shares them.
FULL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Seat:
    """A place for a request.

    Attributes:
        uncached: tokens of its prompt that the worker has to prefill; at least 1.
    """

    worker: Worker
    uncached: int


#: Whether it is the worker that the request was lost on, expected time to first token (seconds), slot.
_Choice = tuple[bool, float, int, Seat]


class Placement(Protocol):
    """Chooses a worker of a fleet. Pure but for its settings."""

    def load(self, worker: Worker) -> float:
        """What workers are ordered by, lowest first."""

    def choose(self, fleet: Fleet, request: Request) -> Seat | None:
        """A worker with room, or None. It prefers another one than that it was lost on."""

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """These settings from now on."""


class LeastLoaded:
    """The worker with the most free slots; knows nothing of prompts."""

    def load(self, worker: Worker) -> float:
        """See :class:`Placement`."""
        return -worker.free

    def choose(self, fleet: Fleet, request: Request) -> Seat | None:
        """See :class:`Placement`."""
        second: Worker | None = None
        with closing(fleet.cheapest()) as workers:
            for worker in islice(workers, LOOKED_AT):
                if worker.free < slots_need(request, worker):
                    continue
                if worker.worker_id != request.shunned:
                    return Seat(worker, max(1, request.job.prompt_tokens))
                second = worker
        return Seat(second, max(1, request.job.prompt_tokens)) if second is not None else None

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """See :class:`Placement`."""


class ExpectedTtft:
    """The worker with the lowest expected time to first token.

    That is (prompt tokens that are not cached there + prompt tokens to prefill before them) / prefill
    rate, and a term for the slots that are taken. It looks at the least loaded workers and at those that
    hold the longest prefix; all others would be slower, but for those with a shorter prefix.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings

    def load(self, worker: Worker) -> float:
        """See :class:`Placement`: the expected time to first token of a prompt of no length, seconds."""
        taken = 1 - worker.free / worker.max_seqs
        return worker.ahead / self._settings.prefill_tokens_per_second + FULL_SECONDS * taken

    def choose(self, fleet: Fleet, request: Request) -> Seat | None:
        """See :class:`Placement`."""
        job = request.job
        kept = fleet.keeper(job.request_id, request.kept) if request.kept else None
        if kept is not None:
            return self._seat(fleet, request, kept)
        best: _Choice | None = None
        prefixes = fleet.prefixes
        # The shortest prefill it can have anywhere.
        least = max(1, job.prompt_tokens - prefixes.longest(job.prefix_hashes))
        least_seconds = least / self._settings.prefill_tokens_per_second
        if least < job.prompt_tokens:
            for worker_id in islice(prefixes.holders(job.prefix_hashes), LOOKED_AT):
                worker = fleet.awake(worker_id)
                if worker is not None and worker.entry:
                    best = self._better(fleet, request, worker, best)
        with closing(fleet.cheapest()) as workers:
            for worker in islice(workers, LOOKED_AT):
                if best is not None and best[:2] <= (False, worker.load + least_seconds):
                    break
                best = self._better(fleet, request, worker, best)
        return best[3] if best is not None else None

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """See :class:`Placement`."""
        self._settings = settings

    def _better(
        self, fleet: Fleet, request: Request, worker: Worker, best: _Choice | None
    ) -> _Choice | None:
        seat = self._seat(fleet, request, worker)
        if seat is None:
            return best
        ttft = worker.load + seat.uncached / self._settings.prefill_tokens_per_second
        choice = (worker.worker_id == request.shunned, ttft, worker.slot, seat)
        return choice if best is None or choice[:3] < best[:3] else best

    def _seat(self, fleet: Fleet, request: Request, worker: Worker) -> Seat | None:
        """This worker, if it has room: slots, KV cache, and prompt tokens in prefill."""
        free = worker.free
        if free <= 0 or free < slots_need(request, worker):
            return None
        need = kv_need(request)
        if worker.kv_total and need > worker.kv_free - worker.given_kv and not worker.idle:
            return None
        cached = fleet.prefixes.held_tokens(worker.worker_id, request.job.prefix_hashes)
        uncached = max(1, request.job.prompt_tokens - cached)
        ahead = worker.ahead
        if ahead and ahead + uncached > self._settings.prefill_tokens_per_worker:
            return None
        return Seat(worker, uncached)


def least_missing(request: Request, worker: Worker) -> tuple[int, ...]:
    """How far a worker is from room for a request: slots, then prompt tokens ahead, then KV tokens."""
    slots = max(0, slots_need(request, worker) - worker.free)
    kv = max(0, kv_need(request) - worker.kv_free + worker.given_kv) if worker.kv_total else 0
    return slots, worker.ahead, kv, worker.slot
