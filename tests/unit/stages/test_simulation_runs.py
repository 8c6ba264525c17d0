"""Whole simulations: every request ends once, equal seeds give equal results, known cases come out right."""

from __future__ import annotations

import dataclasses

import pytest

from contracts.tiers import QueueClass
from infra.settings import Settings, development
from stages.policy import PolicyName, make_policy
from stages.protocols import Dispatch, Expire, GiveUp
from stages.simulation.experiment import Experiment
from stages.simulation.fairness import GapMeter, Line, Passing, jain_index, max_min_shares
from stages.simulation.load_spec import LoadSpec, WorkerLoad, parse_load
from stages.simulation.meter import Meter, Yardstick
from stages.simulation.report import Report
from stages.simulation.requests import SimRequest
from stages.simulation.simulator import Pace, Simulator, TierRules
from stages.simulation.worker_model import SimWorker

POLICIES: tuple[PolicyName, ...] = ("fair", "strict", "fcfs")
SMALL = "overload,seconds=20,workers.count=2,workers.max_seqs=16"


@pytest.fixture(scope="module")
def settings() -> Settings:
    return development("sim")


def run(experiment: Experiment, name: PolicyName, settings: Settings) -> Report:
    return experiment.run(name, make_policy, settings)


@pytest.mark.parametrize("name", POLICIES)
def test_every_request_has_exactly_one_end(name: PolicyName, settings: Settings) -> None:
    experiment = Experiment.of_load(parse_load(SMALL), 1)
    report = run(experiment, name, settings)
    expected = sum(1 for _ in experiment.requests())
    rows = report.tiers.values()
    assert sum(row.requests for row in rows) == expected
    for row in rows:
        assert row.completed + row.expired + row.failed + row.unfinished == row.requests
    assert sum(row.unfinished for row in rows) == 0


@pytest.mark.parametrize("name", POLICIES)
def test_equal_seeds_give_equal_reports(name: PolicyName, settings: Settings) -> None:
    def once(seed: int) -> dict[str, object]:
        return dataclasses.asdict(run(Experiment.of_load(parse_load(SMALL), seed), name, settings))

    assert repr(once(3)) == repr(once(3))
    assert repr(once(3)) != repr(once(4))


@pytest.mark.parametrize("name", POLICIES)
def test_no_request_is_lost_when_workers_die(name: PolicyName, settings: Settings) -> None:
    spec = parse_load("overload,seconds=20,load=0.8,workers.count=4,workers.max_seqs=16")
    experiment = dataclasses.replace(Experiment.of_load(spec, 1), deaths=(5_000.0, 9_000.0))
    report = run(experiment, name, settings)
    for row in report.tiers.values():
        assert row.completed + row.expired == row.requests


#: More conversations than the prefix caches of two workers hold.
CHATS = "chat,seconds=60,per_second=1.5,workers.count=2,workers.prefix_tokens=50000"
TIER = "workers.tier_tokens=2000000"


@pytest.mark.parametrize("name", POLICIES)
def test_no_request_is_lost_or_counted_as_a_loss_when_workers_restart(
    name: PolicyName, settings: Settings
) -> None:
    restarts = (10_000.0, 10_500.0)
    experiment = dataclasses.replace(
        Experiment.of_load(parse_load(f"{CHATS},{TIER}"), 1), restarts=restarts
    )
    once = settings.scheduler.model_copy(update={"max_attempts": 1})
    row = run(experiment, name, settings.model_copy(update={"scheduler": once})).tiers["paid"]
    assert row.completed == row.requests > 50
    assert row.failed == row.unfinished == 0


@pytest.mark.parametrize("restarts", [(), (20_000.0, 30_000.0)])
def test_a_tier_brings_what_no_worker_holds_and_first_tokens_come_sooner(
    restarts: tuple[float, ...], settings: Settings
) -> None:
    def with_load(text: str) -> Report:
        experiment = dataclasses.replace(Experiment.of_load(parse_load(text), 1), restarts=restarts)
        return run(experiment, "fair", settings)

    alone, shared = with_load(CHATS), with_load(f"{CHATS},{TIER}")
    assert alone.loaded_share == 0
    assert shared.loaded_share > 0.1
    assert shared.cached_share > alone.cached_share + 0.1
    assert shared.tiers["paid"].ttft.mean < 0.8 * alone.tiers["paid"].ttft.mean


def test_a_tier_that_is_slower_than_prefill_changes_nothing(settings: Settings) -> None:
    def with_load(text: str) -> str:
        return repr(run(Experiment.of_load(parse_load(text), 1), "fair", settings))

    assert with_load(f"{CHATS},{TIER},workers.tier_load_ms=0.1") == with_load(CHATS)


def one_worker(requests: list[SimRequest], **model: float) -> Experiment:
    return Experiment(
        requests=lambda: requests,
        window_ms=requests[-1].at_ms + 1,
        drain_ms=1e9,
        tiers={"paid": TierRules(QueueClass.INTERACTIVE, 1e9)},
        targets_ms={"paid": 1_000.0},
        workers=WorkerLoad.model_validate({"count": 1, **model}),
    )


def paid(name: str, at_ms: float, prompt: int = 100, output: int = 11) -> SimRequest:
    return SimRequest(at_ms, name, "paid", "t", prompt, output, output)


@pytest.mark.parametrize("name", POLICIES)
def test_a_single_request_has_the_times_of_its_prefill_and_steps(
    name: PolicyName, settings: Settings
) -> None:
    experiment = one_worker([paid("r1", 5.0)], step_ms=10, decode_ms=1, prefill_ms=0.5)
    row = run(experiment, name, settings).tiers["paid"]
    assert row.queue_wait.p99 == 0
    assert row.ttft.p99 == pytest.approx(10 + 100 * 0.5)
    assert row.tpot.p99 == pytest.approx(11)


def test_waits_are_those_of_a_queue_with_constant_service_times(settings: Settings) -> None:
    """M/D/1: the mean wait is load x service time / (2 x (1 - load)), by Pollaczek and Khinchine."""
    spec = LoadSpec.model_validate(
        {
            "seconds": 40_000,
            "per_second": 0.5,
            "drain_seconds": 10_000,
            "tiers": {
                "paid": {
                    "queue_class": "interactive",
                    "share": 1,
                    "prompt": {"median": 10, "most": 10},
                    "reply": {"median": 100, "most": 100},
                    "max_wait_seconds": 1e6,
                }
            },
            "workers": {"count": 1, "max_seqs": 1, "step_ms": 10, "decode_ms": 0, "prefill_ms": 0},
        }
    )
    row = run(Experiment.of_load(spec, 1), "fcfs", settings).tiers["paid"]
    assert row.requests > 15_000
    assert row.queue_wait.mean == pytest.approx(0.5 * 1_000 / (2 * 0.5), rel=0.06)


def test_slots_taken_and_tokens_are_of_the_window(settings: Settings) -> None:
    requests = [paid("r1", 0.0, output=101), paid("r2", 2_000.0, output=2)]
    report = run(
        one_worker(requests, max_seqs=2, step_ms=10, decode_ms=0, prefill_ms=0), "fcfs", settings
    )
    # 101 steps of 10 ms in one of two slots, in 2.001 s of which the second request adds one ms.
    assert report.utilisation == pytest.approx((1_010 + 1) / (2 * 2_001), rel=1e-3)
    assert report.tokens_per_second == pytest.approx(101 / 2.001, rel=0.02)
    assert report.service["paid"]["t"] == pytest.approx(100 + 2 * 101)


class FirstOnly:
    """A policy that gives everything to worker 0 at once, and ends what has waited."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.times: list[int] = []
        self._new: list[str] = []

    def queued(self, job: object, now_ms: int) -> None:
        self.times.append(now_ms)
        self._new.append(job.request_id)  # type: ignore[attr-defined]

    def worker_seen(self, pool: str, event: object, now_ms: int) -> None:
        self.times.append(now_ms)
        self.calls += [f"finished {name}" for name in event.finished]  # type: ignore[attr-defined]

    def ended(self, request_id: str) -> None:
        self.calls.append(f"ended {request_id}")

    def decide(self, now_ms: int) -> list[Dispatch | Expire | GiveUp]:
        self.times.append(now_ms)
        new, self._new = self._new, []
        return [Expire(n) if n == "late" else Dispatch(n, "w0", 0, 1) for n in new]


def test_the_policy_is_told_what_the_scheduler_would_tell_it_and_time_never_goes_back() -> None:
    workers = [SimWorker(WorkerLoad(), 0, "w0")]
    meter = Meter(Yardstick(10_000.0, {"paid": 1_000.0}), workers)
    policy = FirstOnly()
    simulator = Simulator(
        policy,  # type: ignore[arg-type]
        workers,
        {"paid": TierRules(QueueClass.INTERACTIVE, 1e6)},
        meter,
        Pace(500, False, 250, 1_000, 1e6),
        window_per_class=2,
    )
    simulator.run([paid("a", 1.0), paid("late", 2.0), paid("b", 3.0, output=1), paid("c", 4.0)])
    assert simulator.unfinished == []
    assert set(policy.calls) == {
        *(f"ended {n}" for n in ("a", "b", "c", "late")),
        *(f"finished {n}" for n in "abc"),
    }
    assert len(policy.calls) == 7
    assert policy.times == sorted(policy.times)
    assert meter.report("x", [], simulator.now_ms).tiers["paid"].expired == 1


def test_what_one_has_not_asked_for_goes_to_the_others() -> None:
    assert max_min_shares({"a": 1.0, "b": 10.0, "c": 10.0}, 9.0) == {"a": 1.0, "b": 4.0, "c": 4.0}
    assert max_min_shares({"a": 1.0, "b": 2.0}, 9.0) == {"a": 1.0, "b": 2.0}


def test_jains_index_is_1_for_fair_shares_and_1_nth_when_one_has_all() -> None:
    demands = {"a": 1.0, "b": 10.0, "c": 10.0}
    assert jain_index({"a": 1.0, "b": 4.0, "c": 4.0}, demands) == pytest.approx(1)
    assert jain_index({"a": 0.0, "b": 3.0, "c": 0.0}, {"a": 3.0, "b": 3.0, "c": 3.0}) == pytest.approx(
        1 / 3
    )


def test_a_gap_counts_only_while_both_tenants_wait() -> None:
    gap = GapMeter()
    both = ["a", "b"]
    gap.sample({"a": 0.0, "b": 0.0}, both, set())
    gap.sample({"a": 50.0, "b": 40.0}, both, set(both))
    assert gap.worst == 10
    gap.sample({"a": 900.0}, ["a"], {"a"})
    gap.sample({"a": 1_900.0, "b": 40.0}, both, {"a"})
    assert gap.worst == 10
    gap.sample({"a": 1_905.0, "b": 70.0}, both, set(both))
    assert gap.worst == 25


def test_starved_are_those_whose_line_stood_still_while_later_ones_went() -> None:
    passing = Passing(patience_ms=30.0)
    quiet, busy = Line({"q1": 0.0, "q2": 50.0}), Line({"b1": 5.0, "b2": 6.0})
    passing.started(busy, "paid", "b1", 40.0)
    passing.judge(quiet, "free", 41.0)
    assert passing.starved == {"q1": "free"}
    passing.started(quiet, "free", "q1", 45.0)
    passing.judge(quiet, "free", 74.0)
    assert passing.starved == {"q1": "free"}
    # In its own line nobody passes anybody; and an older line is not passed by older requests.
    passing = Passing(patience_ms=30.0)
    passing.started(Line({"old": 0.0}), "paid", "old", 500.0)
    passing.judge(Line({"new": 10.0}), "free", 500.0)
    assert passing.starved == {}


def test_a_turn_that_came_too_early_waits_from_the_end_of_the_one_before() -> None:
    meter = Meter(Yardstick(10_000.0, {"paid": 1_000.0}), [SimWorker(WorkerLoad(), 0, "w0")])
    turns = [paid(name, at)._replace(conversation_id="c") for name, at in (("a", 0.0), ("b", 100.0))]
    first, second = (meter.arrived(turn) for turn in turns)
    assert list(first.line.waiting) == ["a"]
    meter.dispatched(first, 200.0)
    meter.first_token(first, 300.0, 100)
    meter.left_worker(first, 200.0, 11, 400.0)
    assert not first.line.waiting
    meter.completed(first, 400.0)
    assert second.line.waiting == {"b": 400.0}
