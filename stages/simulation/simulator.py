"""The loop of a simulation: arrivals, step ends, heartbeats and ticks in order of virtual time.

It stands where the scheduler's shell, the queues and the workers stand in production, and treats the
policy as they do (:mod:`stages.scheduler`). What it leaves out: messages take no time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from contracts.tiers import QueueClass
from contracts.worker_events import WorkerEvent

from ..protocols import Dispatch, Expire, GiveUp, Job, Preempt, SchedulingPolicy
from .meter import Meter, Passage
from .requests import SimRequest
from .worker_model import Run, SimWorker

POOL = "default"
#: Virtual time starts here, so that no time that a policy sees is 0.
ORIGIN_MS = 1_000_000

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class TierRules:
    """How a tier's requests wait."""

    queue_class: QueueClass
    max_wait_ms: float


class Fall(NamedTuple):
    """A worker's end.

    Attributes:
        at_ms / worker: when, and the index of the worker.
        restarts: it hands over what it has, and its successor begins at once; else it is gone without a word.
    """

    at_ms: float
    worker: int
    restarts: bool = False


@dataclass(frozen=True, slots=True)
class Pace:
    """How often things that recur do, milliseconds.

    Attributes:
        heartbeat_ms: a worker reports so often, besides its reports of ends.
        tells_all: the reports of ends say how far all replies are: heartbeats are too rare for it.
        tick_ms: the policy is asked so often, besides after every event.
        sample_ms: the meter looks so often.
        give_up_ms: a simulation is stopped at this time, whatever still waits.
    """

    heartbeat_ms: float
    tells_all: bool
    tick_ms: float
    sample_ms: float
    give_up_ms: float


#: An event's fields that the simulation leaves as they are, and those that it sets anew each time.
_BLANK = WorkerEvent(worker_id="", slot=0, sent_ms=0, max_seqs=0, running=0).model_dump()


def _event(**fields: object) -> WorkerEvent:
    """An event, for a tenth of the time that its validation takes; what is not given has its default."""
    event = WorkerEvent.__new__(WorkerEvent)
    event.__dict__.update(_BLANK)
    event.__dict__.update(fields)
    return event


class Simulator:
    """One run of one policy over one stream of requests."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        workers: list[SimWorker],
        tiers: Mapping[str, TierRules],
        meter: Meter,
        pace: Pace,
        window_per_class: int,
        falls: Iterable[Fall] = (),
    ) -> None:
        """Put the parts together.

        Args:
            window_per_class: requests a policy is shown per class; the others wait as if in Kafka.
            falls: of workers, in any order.
        """
        self._policy = policy
        self._workers = workers
        self._alive = {w.worker_id: w for w in workers}
        self._tiers = tiers
        self._meter = meter
        self._pace = pace
        self._room = dict.fromkeys(QueueClass, window_per_class)
        self._line: dict[QueueClass, deque[Passage]] = {c: deque() for c in QueueClass}
        self._open: dict[str, Passage] = {}
        self._events: list[tuple[float, int]] = []
        self._falls = sorted(falls, reverse=True)
        self._probing = bool(self._falls)
        self._beats: deque[tuple[float, SimWorker]] = deque()
        self._held_back = 0
        self._policy_ms = ORIGIN_MS
        self.now_ms = 0.0

    def run(self, requests: Iterable[SimRequest]) -> float:
        """Run until every request has ended, or it is to be given up; returns the virtual time of the end.

        Args:
            requests: in order of arrival.
        """
        pace, events, workers = self._pace, self._events, self._workers
        arrivals = iter(requests)
        arrival = next(arrivals, None)
        for worker in workers:
            self._report(worker, [], [])
        # Spread over the interval, as those of workers that were not started together.
        share = pace.heartbeat_ms / len(workers)
        beats = self._beats
        beats.extend((share * (w.index + 1), w) for w in workers)
        tick_ms, sample_ms = pace.tick_ms, pace.sample_ms
        recurring_ms = min(beats[0][0], tick_ms, sample_ms)
        while arrival is not None or self._open:
            arrival_ms = arrival.at_ms if arrival is not None else NEVER
            step_ms = events[0][0] if events else NEVER
            now_ms = min(arrival_ms, step_ms, recurring_ms)
            if now_ms > pace.give_up_ms:
                break
            self.now_ms = now_ms
            self._policy_ms = ORIGIN_MS + int(now_ms)
            if now_ms == step_ms:
                worker = workers[heapq.heappop(events)[1]]
                if worker.next_ms == now_ms:
                    self._step_ends(worker)
                continue
            if arrival is not None and now_ms == arrival_ms:
                self._arrive(arrival)
                arrival = next(arrivals, None)
                continue
            if beats and now_ms == beats[0][0]:
                worker = beats.popleft()[1]
                if worker.worker_id in self._alive:
                    self._report(worker, [], [], self._progress(worker))
                    beats.append((now_ms + pace.heartbeat_ms, worker))
                    self._decide()
            elif now_ms == sample_ms:
                self._meter.sample(now_ms)
                sample_ms += pace.sample_ms
            else:
                self._tick()
                tick_ms += pace.tick_ms
            recurring_ms = min(beats[0][0] if beats else NEVER, tick_ms, sample_ms)
        return self.now_ms

    @property
    def unfinished(self) -> list[Passage]:
        """Requests that have not ended."""
        return list(self._open.values())

    def _arrive(self, request: SimRequest) -> None:
        passage = self._open[request.request_id] = self._meter.arrived(request)
        queue_class = self._tiers[request.tier].queue_class
        self._line[queue_class].append(passage)
        self._held_back += 1
        if self._fill_window(queue_class):
            self._decide()

    def _fill_window(self, queue_class: QueueClass) -> bool:
        """Show the policy as many requests as it may see; whether there were any."""
        line = self._line[queue_class]
        filled = False
        while line and self._room[queue_class] > 0:
            self._room[queue_class] -= 1
            self._held_back -= 1
            self._policy.queued(self._job(line.popleft().request), self._policy_ms)
            filled = True
        return filled

    def _job(self, request: SimRequest) -> Job:
        rules = self._tiers[request.tier]
        queued_ms = ORIGIN_MS + int(request.at_ms)
        return Job(
            request_id=request.request_id,
            queue_class=rules.queue_class,
            pool=POOL,
            tenant=request.tenant,
            choices=1,
            prompt_tokens=request.prompt_tokens,
            queued_ms=queued_ms,
            deadline_ms=queued_ms + int(rules.max_wait_ms),
            output_tokens=request.max_tokens,
            prefix_hashes=request.prefix_hashes,
            conversation_id=request.conversation_id,
        )

    def _decide(self) -> None:
        """Perform what the policy decides, until it has seen all it may see and has nothing to add."""
        while effects := self._policy.decide(self._policy_ms):
            for effect in effects:
                match effect:
                    case Dispatch():
                        self._dispatch(effect)
                    case Preempt():
                        self._preempt(effect)
                    case Expire() | GiveUp():
                        self._drop(effect.request_id, expired=isinstance(effect, Expire))
            if not self._held_back:
                return
            filled = [self._fill_window(queue_class) for queue_class in QueueClass]
            if not any(filled):
                return

    def _dispatch(self, effect: Dispatch) -> None:
        passage = self._open[effect.request_id]
        if passage.started_ms is None:
            self._room[self._tiers[passage.request.tier].queue_class] += 1
        worker = self._alive.get(effect.worker_id)
        if worker is not None:
            self._meter.dispatched(passage, self.now_ms)
            passage.attempts = effect.attempt
            passage.worker_id = worker.worker_id
            worker.join(passage.request, passage.emitted, self.now_ms)
            self._schedule(worker)

    def _preempt(self, effect: Preempt) -> None:
        worker = self._alive.get(effect.worker_id)
        if worker is not None:
            worker.abort(effect.request_id, self.now_ms)
            self._schedule(worker)

    def _drop(self, request_id: str, *, expired: bool) -> None:
        passage = self._open.pop(request_id)
        if passage.started_ms is None:
            self._room[self._tiers[passage.request.tier].queue_class] += 1
        self._meter.dropped(passage, self.now_ms, expired=expired)
        self._policy.ended(request_id)

    def _schedule(self, worker: SimWorker) -> None:
        """Note when a worker's batch changes next; what was noted before is skipped when it comes."""
        if worker.next_ms is not None:
            heapq.heappush(self._events, (worker.next_ms, worker.index))

    def _step_ends(self, worker: SimWorker) -> None:
        now_ms, meter = self.now_ms, self._meter
        changes = worker.step_ends()
        self._schedule(worker)
        for run in changes.started:
            meter.first_token(self._open[run.request.request_id], now_ms, run.computed, run.loaded)
        if not (changes.finished or changes.aborted):
            return
        for run in changes.finished:
            passage = self._open.pop(run.request.request_id)
            meter.left_worker(passage, run.since_ms, run.emitted, now_ms)
            meter.completed(passage, now_ms)
        for run in changes.aborted:
            passage = self._open[run.request.request_id]
            meter.left_worker(passage, run.since_ms, run.emitted, now_ms)
            meter.waits_again(passage, now_ms, preempted=True)
        self._report(worker, changes.finished, changes.aborted)
        self._decide()

    def _report(
        self,
        worker: SimWorker,
        finished: list[Run],
        aborted: list[Run],
        generated: dict[str, int] | None = None,
    ) -> None:
        """Send a worker's event, and do with it what the scheduler's shell does.

        Args:
            generated: output tokens of all it runs; None = of those that leave.
        """
        gained, lost = worker.cache.changes()
        tier = worker.tier
        found, missing = tier.news() if tier is not None else ([], [])
        if generated is None:
            generated = self._progress(worker) if self._pace.tells_all else {}
            generated |= {run.request.request_id: run.emitted for run in (*finished, *aborted)}
        event = _event(
            worker_id=worker.worker_id,
            slot=worker.index,
            sent_ms=self._policy_ms,
            max_seqs=worker.model.max_seqs,
            running=len(worker.runs),
            kv_tokens_total=worker.model.kv_tokens,
            kv_tokens_free=worker.kv_free(self.now_ms),
            finished=[run.request.request_id for run in finished],
            handed_over=[run.request.request_id for run in aborted],
            generated=generated,
            prefill_tokens=worker.prefill_backlog(),
            prefixes=gained,
            prefixes_gone=lost,
            tier_prefixes=found,
            tier_prefixes_gone=missing,
            load_us_per_token=1_000 * tier.load_ms if tier is not None else None,
            prefill_us_per_token=1_000 * worker.model.prefill_ms,
        )
        policy, policy_ms = self._policy, self._policy_ms
        policy.worker_seen(POOL, event, policy_ms)
        for request_id in event.finished:
            policy.ended(request_id)
        for request_id in event.handed_over:
            policy.orphaned(request_id, 0, policy_ms)

    def _progress(self, worker: SimWorker) -> dict[str, int]:
        return {run.request.request_id: n for run, n in worker.progress(self.now_ms)}

    def _tick(self) -> None:
        while self._falls and self._falls[-1].at_ms <= self.now_ms:
            fall = self._falls.pop()
            self._fall(self._workers[fall.worker], restarts=fall.restarts)
        if self._probing:
            for request_id in self._policy.to_probe(self._policy_ms):
                passage = self._open[request_id]
                self._policy.probed(request_id, passage.worker_id, passage.attempts, self._policy_ms)
        self._decide()

    def _fall(self, worker: SimWorker, *, restarts: bool) -> None:
        """See :class:`Fall`."""
        if self._alive.pop(worker.worker_id, None) is None:
            return
        left = list(worker.runs)
        for run, emitted in worker.progress(self.now_ms):
            passage = self._open[run.request.request_id]
            self._meter.left_worker(passage, run.since_ms, emitted, self.now_ms)
            self._meter.waits_again(passage, self.now_ms, preempted=False)
        worker.runs.clear()
        worker.next_ms = None
        if restarts:
            self._begin(worker.restarted())
            for request_id in left:
                self._policy.orphaned(request_id, 0, self._policy_ms)

    def _begin(self, worker: SimWorker) -> None:
        """A worker takes the place of the one before it."""
        self._workers[worker.index] = worker
        self._alive[worker.worker_id] = worker
        self._beats.append((self.now_ms + self._pace.heartbeat_ms, worker))
        self._report(worker, [], [])
