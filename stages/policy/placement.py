"""Where a request goes."""

from __future__ import annotations

import math
from contextlib import closing
from itertools import islice
from typing import NamedTuple, Protocol

from infra.settings import SchedulerSettings

from .fleet import Fleet
from .request import Request
from .worker import Worker, kv_need, slots_need

#: Workers that are looked at for one request: so many of the least loaded, and of those with its prefix.
LOOKED_AT = 4
#: What a worker with all slots taken costs a first token more than an empty one, seconds: its steps are
#: longer, and the prefill shares them.
FULL_SECONDS = 0.1


class Seat(NamedTuple):
    """A place for a request.

    Attributes:
        uncached: what its prompt costs there, in tokens to prefill: those that nobody holds, and those that
            are loaded at what they cost; at least 1.
        held / loaded: tokens of its prompt that the worker holds / that it loads from the KV tier.
    """

    worker: Worker
    uncached: int
    held: int = 0
    loaded: int = 0


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
    rate, and a term for the slots that are taken. Tokens that the worker does not hold and the KV tier does
    count as what they take it to load. It looks at the least loaded workers and at those that hold the
    longest prefix; all others would be slower, but for those with a shorter prefix.
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
        in_tier = fleet.tier.held_tokens(job.prefix_hashes)
        kept = fleet.keeper(job.request_id, request.kept) if request.kept else None
        if kept is not None:
            return self._seat(fleet, request, kept, in_tier)
        best: _Choice | None = None
        prefixes = fleet.prefixes
        longest = prefixes.longest(job.prefix_hashes)
        # The shortest prefill it can have anywhere.
        least = max(1, job.prompt_tokens - max(longest, in_tier))
        least_seconds = least / self._settings.prefill_tokens_per_second
        if longest:
            for worker_id in islice(prefixes.holders(job.prefix_hashes), LOOKED_AT):
                worker = fleet.awake(worker_id)
                if worker is not None and worker.entry:
                    best = self._better(fleet, request, worker, in_tier, best)
        with closing(fleet.cheapest()) as workers:
            for worker in islice(workers, LOOKED_AT):
                if best is not None and best[:2] <= (False, worker.load + least_seconds):
                    break
                best = self._better(fleet, request, worker, in_tier, best)
        return best[3] if best is not None else None

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """See :class:`Placement`."""
        self._settings = settings

    def _better(
        self, fleet: Fleet, request: Request, worker: Worker, in_tier: int, best: _Choice | None
    ) -> _Choice | None:
        seat = self._seat(fleet, request, worker, in_tier)
        if seat is None:
            return best
        ttft = worker.load + seat.uncached / self._settings.prefill_tokens_per_second
        choice = (worker.worker_id == request.shunned, ttft, worker.slot, seat)
        return choice if best is None or choice[:3] < best[:3] else best

    def _seat(self, fleet: Fleet, request: Request, worker: Worker, in_tier: int) -> Seat | None:
        """This worker, if it has room: slots, KV cache, and prompt tokens in prefill.

        Args:
            in_tier: tokens of the prompt's longest prefix that the KV tier holds.
        """
        free = worker.free
        if free <= 0 or free < slots_need(request, worker):
            return None
        need = kv_need(request)
        if worker.kv_total and need > worker.kv_free - worker.given_kv and not worker.idle:
            return None
        held = fleet.prefixes.held_tokens(worker.worker_id, request.job.prefix_hashes)
        loaded = 0
        if in_tier > held and worker.load_ratio < 1:
            loaded = in_tier - held
        uncached = max(1, request.job.prompt_tokens - held - loaded)
        if loaded:
            uncached += math.ceil(loaded * worker.load_ratio)
        ahead = worker.ahead
        if ahead and ahead + uncached > self._settings.prefill_tokens_per_worker:
            return None
        return Seat(worker, uncached, held, loaded)


def least_missing(request: Request, worker: Worker) -> tuple[int, ...]:
    """How far a worker is from room for a request: slots, then prompt tokens ahead, then KV tokens."""
    slots = max(0, slots_need(request, worker) - worker.free)
    kv = max(0, kv_need(request) - worker.kv_free + worker.given_kv) if worker.kv_total else 0
    return slots, worker.ahead, kv, worker.slot
