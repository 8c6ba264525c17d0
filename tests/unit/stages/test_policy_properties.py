"""What holds for every sequence of events: the policies against a model of the world."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from contracts.tiers import QueueClass
from stages.policy import PolicyName, make_policy
from stages.protocols import Dispatch, Effect, Expire, GiveUp, Job, Preempt
from tests.scheduling import LEASE, job, scheduler_settings, worker

PREFILL = 1_000
SETTINGS = scheduler_settings(
    ageing_seconds=5,
    max_overtakes=3,
    max_preemptions=1,
    prefill_tokens_per_worker=PREFILL,
    reserved_slots={"interactive": 0.3},
)
SEQS = {0: 1, 1: 2, 2: 4}


class PolicyMachine(RuleBasedStateMachine):
    """Plays queue, workers and Redis. ``given`` is what was dispatched and not taken back."""

    kind: ClassVar[PolicyName]

    @initialize()
    def begin(self) -> None:
        self.policy = make_policy(self.kind, SETTINGS, LEASE, "me")
        self.twin = make_policy(self.kind, SETTINGS, LEASE, "me")
        self.now = 1_000_000
        self.count = 0
        self.jobs: dict[str, Job] = {}
        self.given: dict[str, Dispatch] = {}
        self.attempts: dict[str, int] = {}
        self.preempted: dict[str, int] = {}
        self.over: set[str] = set()
        self.seen: dict[int, int] = {}
        self.granted: dict[int, int] = {}
        self.untaken: dict[str, Dispatch] = {}
        self.prefilling: dict[int, dict[str, int]] = {slot: {} for slot in SEQS}
        self.incarnation = dict.fromkeys(SEQS, 0)

    def worker_id(self, slot: int) -> str:
        return f"w{slot}.{self.incarnation[slot]}"

    @rule(
        queue_class=st.sampled_from(list(QueueClass)),
        n=st.integers(1, 5),
        age=st.integers(0, 20_000),
        wait=st.integers(1, 60_000),
        tenant=st.sampled_from("abc"),
        prompt=st.sampled_from([1, 300, 900, 3_000]),
        prefix=st.sampled_from([(), ("x",), ("x", "y")]),
        conversation=st.sampled_from([None, None, "talk"]),
    )
    def queue(
        self,
        queue_class: QueueClass,
        n: int,
        age: int,
        wait: int,
        tenant: str,
        prompt: int,
        prefix: tuple[str, ...],
        conversation: str | None,
    ) -> None:
        self.count += 1
        name = f"r{self.count:04d}"
        self.jobs[name] = job(
            name,
            queue_class,
            queued=self.now - age,
            wait=wait,
            n=n,
            tenant=tenant,
            prompt=prompt,
            prefix=prefix,
            conversation=conversation,
        )
        for policy in (self.policy, self.twin):
            policy.queued(self.jobs[name], self.now)

    @rule(data=st.data())
    def queue_again(self, data: st.DataObject) -> None:
        if self.jobs:
            known = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
            for policy in (self.policy, self.twin):
                policy.queued(known, self.now)

    @rule(
        slot=st.sampled_from(sorted(SEQS)),
        restarted=st.booleans(),
        prefilled=st.booleans(),
        tokens=st.integers(0, 50),
        prefixes=st.sampled_from([[], ["x"], ["x", "y"]]),
        grant=st.one_of(st.none(), st.integers(0, 4)),
    )
    def heartbeat(
        self,
        slot: int,
        restarted: bool,
        prefilled: bool = True,
        tokens: int = 0,
        prefixes: list[str] | None = None,
        grant: int | None = None,
    ) -> None:
        self.incarnation[slot] += restarted
        self.seen[slot] = self.now
        runs = [d.request_id for d in self.given.values() if d.worker_id == self.worker_id(slot)]
        if prefilled or restarted:
            self.prefilling[slot] = {}
        self.granted[slot] = 1_000 if grant is None else grant
        self.untaken = {name: d for name, d in self.untaken.items() if d.slot != slot}
        for policy in (self.policy, self.twin):
            worker(
                policy,
                self.worker_id(slot),
                slot,
                seqs=SEQS[slot],
                running=sum(self.jobs[name].choices for name in runs),
                now=self.now,
                generated=dict.fromkeys(runs, tokens),
                prefill_tokens=sum(self.prefilling[slot].values()),
                prefixes=prefixes or [],
                prefixes_gone=[] if prefixes else ["y"],
                credits={} if grant is None else {"me": grant, "other": 9},
            )

    @rule(ms=st.integers(0, 3_000))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule(
        data=st.data(),
        how=st.sampled_from(["finished", "handed over", "undelivered", "alive", "lost", "not started"]),
    )
    def something_happens_in_flight(self, data: st.DataObject, how: str) -> None:
        if not self.given:
            return
        name = data.draw(st.sampled_from(sorted(self.given)))
        attempt = self.given[name].attempt
        before = self.policy.in_flight()
        for policy in (self.policy, self.twin):
            match how:
                case "finished":
                    policy.ended(name)
                case "handed over":
                    policy.orphaned(name, 0, self.now)
                case "undelivered":
                    policy.undelivered(name, self.now)
                case "alive":
                    policy.probed(name, "somebody", attempt, self.now)
                case _:
                    policy.probed(name, None, attempt if how == "lost" else 0, self.now)
        if self.policy.in_flight() < before:
            self.no_longer_given(name)
        if how == "finished":
            self.forget(name)

    def no_longer_given(self, name: str) -> None:
        self.untaken.pop(name, None)
        dispatch = self.given.pop(name, None)
        if dispatch is not None:
            self.prefilling[dispatch.slot].pop(name, None)

    def forget(self, name: str) -> None:
        self.no_longer_given(name)
        del self.jobs[name]
        self.over.discard(name)

    @rule(paused=st.sampled_from([frozenset(), frozenset({QueueClass.BATCH})]))
    def pause(self, paused: frozenset[QueueClass]) -> None:
        for policy in (self.policy, self.twin):
            policy.pause(paused)
        self.paused = paused

    paused: frozenset[QueueClass] = frozenset()

    @rule()
    def decide(self) -> None:
        effects = self.policy.decide(self.now)
        assert effects == self.twin.decide(self.now), "equal events, unequal decisions"
        for effect in effects:
            name = effect.request_id
            assert name in self.jobs, "an effect for a request that is not known"
            assert name not in self.over, "ended twice"
            match effect:
                case Dispatch():
                    assert name not in self.given, "dispatched while in flight"
                    self.check_dispatch(effect)
                case Preempt():
                    assert self.given[name].worker_id == effect.worker_id
                    assert self.jobs[name].queue_class is QueueClass.BATCH
                    self.preempted[name] = self.preempted.get(name, 0) + 1
                    assert self.preempted[name] <= SETTINGS.max_preemptions
                case Expire():
                    assert self.now >= self.jobs[name].deadline_ms
                    self.over.add(name)
                case GiveUp():
                    assert self.attempts.get(name, 0) > 0, "given up without ever being dispatched"
                    self.over.add(name)
        self.check_all(effects)
        assert not [e for e in self.policy.decide(self.now) if not isinstance(e, Preempt)]
        self.twin.decide(self.now)

    def check_dispatch(self, effect: Dispatch) -> None:
        name, slot = effect.request_id, effect.slot
        one = self.jobs[name]
        assert effect.worker_id == self.worker_id(slot), "to a worker that is gone"
        assert self.now - self.seen[slot] <= SETTINGS.worker_timeout_ms
        assert effect.attempt > self.attempts.get(name, 0), "an attempt number used twice"
        assert one.queue_class not in self.paused
        assert self.free(slot) >= min(one.choices, SEQS[slot]), "over capacity"
        on_their_way = sum(self.jobs[n].choices for n, d in self.untaken.items() if d.slot == slot)
        assert self.granted[slot] > on_their_way, "over its grant"
        self.untaken[name] = effect
        self.attempts[name] = effect.attempt
        self.given[name] = effect

    def check_all(self, effects: list[Effect]) -> None:
        """What a kind of policy promises besides."""

    def free(self, slot: int) -> int:
        mine = [d for d in self.given.values() if d.worker_id == self.worker_id(slot)]
        return SEQS[slot] - sum(self.jobs[d.request_id].choices for d in mine)

    @rule()
    def endings_done(self) -> None:
        for name in sorted(self.over):
            for policy in (self.policy, self.twin):
                policy.ended(name)
            self.forget(name)

    @invariant()
    def nobody_is_lost(self) -> None:
        if not hasattr(self, "policy"):
            return
        waiting = sum(self.policy.waiting().values())
        assert waiting + len(self.given) + len(self.over) == len(self.jobs)
        assert self.policy.in_flight() == len(self.given)

    def teardown(self) -> None:
        """With living workers and patience, everything reaches its end: nothing starves."""
        if not hasattr(self, "policy"):
            return
        self.pause(frozenset())
        for _ in range(6 * len(self.jobs) + 6):
            self.now += 100
            for slot in SEQS:
                self.heartbeat(slot, restarted=False)
            self.decide()
            self.endings_done()
            for name in sorted(self.given):
                for policy in (self.policy, self.twin):
                    policy.ended(name)
                self.forget(name)
        assert not self.jobs


class BaselineMachine(PolicyMachine):
    """What the orders without overtaking promise."""

    def check_all(self, effects: list[Effect]) -> None:
        ordered = [self.key(self.jobs[e.request_id]) for e in effects if isinstance(e, Dispatch)]
        assert ordered == sorted(ordered)

    def key(self, one: Job) -> tuple[int, int, str]:
        rank = one.queue_class.rank if self.kind == "strict" else 0
        return rank, one.queued_ms, one.request_id


class FcfsMachine(BaselineMachine):
    kind = "fcfs"


class StrictMachine(BaselineMachine):
    kind = "strict"


class FairMachine(PolicyMachine):
    kind = "fair"

    def check_dispatch(self, effect: Dispatch) -> None:
        one, ahead = self.jobs[effect.request_id], self.prefilling[effect.slot]
        cached = 256 * len(one.prefix_hashes)
        least = max(1, one.prompt_tokens - cached)
        assert not ahead or sum(ahead.values()) + least <= PREFILL, "too much to prefill"
        super().check_dispatch(effect)
        ahead[effect.request_id] = least

    def check_all(self, effects: list[Effect]) -> None:
        talks = [
            (self.jobs[name].tenant, "talk") for name in self.given if self.jobs[name].conversation_id
        ]
        assert len(talks) == len(set(talks)), "a conversation runs twice"


for machine in (FcfsMachine, StrictMachine, FairMachine):
    machine.TestCase.settings = hypothesis_settings(
        max_examples=80, stateful_step_count=40, deadline=None
    )
TestFirstComeFirstServed = FcfsMachine.TestCase
TestStrictPriority = StrictMachine.TestCase
TestFair = FairMachine.TestCase
