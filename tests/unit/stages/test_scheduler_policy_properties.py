"""What holds for every sequence of events: the policy against a model of the world."""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from contracts.tiers import QueueClass
from contracts.worker_events import WorkerEvent
from infra.settings import SchedulerSettings
from stages.protocols import Dispatch, Expire, GiveUp, Job
from stages.scheduler_policy import StrictPolicy

LEASE = 1_000
SETTINGS = SchedulerSettings(ageing_seconds=5, worker_timeout_ms=2_000, max_attempts=3)
SEQS = {0: 1, 1: 2, 2: 4}


class PolicyMachine(RuleBasedStateMachine):
    """Plays queue, workers and Redis. ``given`` is what was dispatched and not taken back."""

    @initialize()
    def begin(self) -> None:
        self.policy = StrictPolicy(SETTINGS, LEASE)
        self.now = 1_000_000
        self.count = 0
        self.jobs: dict[str, Job] = {}
        self.given: dict[str, Dispatch] = {}
        self.attempts: dict[str, int] = {}
        self.over: set[str] = set()
        self.seen: dict[int, int] = {}
        self.incarnation = dict.fromkeys(SEQS, 0)

    def worker_id(self, slot: int) -> str:
        return f"w{slot}.{self.incarnation[slot]}"

    @rule(
        queue_class=st.sampled_from(list(QueueClass)),
        n=st.integers(1, 5),
        age=st.integers(0, 20_000),
        wait=st.integers(1, 60_000),
    )
    def queue(self, queue_class: QueueClass, n: int, age: int, wait: int) -> None:
        self.count += 1
        name = f"r{self.count:04d}"
        queued = self.now - age
        self.jobs[name] = Job(name, queue_class, "p", "t", n, 1, queued, queued + wait)
        self.policy.queued(self.jobs[name], self.now)

    @rule(data=st.data())
    def queue_again(self, data: st.DataObject) -> None:
        if self.jobs:
            self.policy.queued(self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))], self.now)

    @rule(slot=st.sampled_from(sorted(SEQS)), restarted=st.booleans())
    def heartbeat(self, slot: int, restarted: bool) -> None:
        self.incarnation[slot] += restarted
        self.seen[slot] = self.now
        running = sum(
            self.jobs[d.request_id].choices
            for d in self.given.values()
            if d.worker_id == self.worker_id(slot)
        )
        event = WorkerEvent(
            worker_id=self.worker_id(slot), slot=slot, sent_ms=0, max_seqs=SEQS[slot], running=running
        )
        self.policy.worker_seen("p", event, self.now)

    @rule(ms=st.integers(0, 3_000))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule(
        data=st.data(), how=st.sampled_from(["finished", "undelivered", "alive", "lost", "not started"])
    )
    def something_happens_in_flight(self, data: st.DataObject, how: str) -> None:
        if not self.given:
            return
        name = data.draw(st.sampled_from(sorted(self.given)))
        match how:
            case "finished":
                self.policy.ended(name)
                self.forget(name)
            case "undelivered":
                self.policy.undelivered(name, self.now)
                del self.given[name]
            case "alive":
                self.policy.probed(name, "somebody", self.given[name].attempt, self.now)
            case _:
                started = self.given[name].attempt if how == "lost" else 0
                before = self.policy.in_flight()
                self.policy.probed(name, None, started, self.now)
                if self.policy.in_flight() < before:
                    del self.given[name]

    def forget(self, name: str) -> None:
        self.given.pop(name, None)
        del self.jobs[name]
        self.over.discard(name)

    @rule()
    def decide(self) -> None:
        free_before = {slot: self.free(slot) for slot in SEQS}
        ordered: list[tuple[int, int, str]] = []
        for effect in self.policy.decide(self.now):
            name = effect.request_id
            assert name in self.jobs, "an effect for a request that is not known"
            assert name not in self.given, "dispatched or ended while in flight"
            assert name not in self.over, "ended twice"
            match effect:
                case Dispatch():
                    job = self.jobs[name]
                    assert effect.worker_id == self.worker_id(effect.slot), "to a worker that is gone"
                    assert self.now - self.seen[effect.slot] <= SETTINGS.worker_timeout_ms
                    assert effect.attempt > self.attempts.get(name, 0), "an attempt number used twice"
                    self.attempts[name] = effect.attempt
                    need = min(job.choices, SEQS[effect.slot])
                    assert free_before[effect.slot] >= need, "over capacity"
                    free_before[effect.slot] -= job.choices
                    self.given[name] = effect
                    lifts = (self.now - job.queued_ms) // int(1000 * SETTINGS.ageing_seconds)
                    ordered.append((max(0, job.queue_class.rank - lifts), job.queued_ms, name))
                case Expire():
                    assert self.now >= self.jobs[name].deadline_ms
                    self.over.add(name)
                case GiveUp():
                    assert self.attempts.get(name, 0) > 0, "given up without ever being dispatched"
                    self.over.add(name)
        assert ordered == sorted(ordered), "the order is class after ageing, then age"

    def free(self, slot: int) -> int:
        mine = [d for d in self.given.values() if d.worker_id == self.worker_id(slot)]
        return SEQS[slot] - sum(self.jobs[d.request_id].choices for d in mine)

    @rule()
    def endings_done(self) -> None:
        for name in sorted(self.over):
            self.policy.ended(name)
            self.forget(name)

    @invariant()
    def nobody_is_lost(self) -> None:
        if not hasattr(self, "policy"):
            return
        waiting = sum(self.policy.waiting().values())
        assert waiting + len(self.given) + len(self.over) == len(self.jobs)
        assert self.policy.in_flight() == len(self.given)

    def teardown(self) -> None:
        """With living workers and patience, everything reaches its end."""
        if not hasattr(self, "policy"):
            return
        for _ in range(6 * len(self.jobs) + 6):
            for slot in SEQS:
                self.heartbeat(slot, restarted=False)
            self.decide()
            self.endings_done()
            for name in sorted(self.given):
                self.policy.ended(name)
                self.forget(name)
        assert not self.jobs


PolicyMachine.TestCase.settings = hypothesis_settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
TestPolicy = PolicyMachine.TestCase
