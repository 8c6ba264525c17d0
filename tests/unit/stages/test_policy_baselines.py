"""The two baselines: their orders, and the least loaded worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from contracts.tiers import QueueClass
from stages.policy import make_policy
from stages.protocols import Dispatch, SchedulingPolicy
from tests.scheduling import LEASE, NOW, dispatched, job, scheduler_settings, serve_all, worker

Make = Callable[[], SchedulingPolicy]


def strict() -> SchedulingPolicy:
    return make_policy("strict", scheduler_settings(), LEASE)


def fcfs() -> SchedulingPolicy:
    return make_policy("fcfs", scheduler_settings(), LEASE)


def queue_all_classes(p: SchedulingPolicy) -> None:
    for i, queue_class in enumerate(reversed(list(QueueClass))):
        p.queued(job(f"{queue_class}-late", queue_class, queued=NOW - 10 + i), NOW)
        p.queued(job(f"{queue_class}-early", queue_class, queued=NOW - 20 + i), NOW)
    worker(p, "w")


def test_strict_serves_classes_in_order_and_each_first_come_first_served() -> None:
    p = strict()
    queue_all_classes(p)
    assert serve_all(p) == [
        f"{queue_class}-{when}" for queue_class in QueueClass for when in ("early", "late")
    ]


def test_fcfs_does_not_look_at_classes() -> None:
    p = fcfs()
    queue_all_classes(p)
    assert serve_all(p) == [
        f"{queue_class}-{when}"
        for when in ("early", "late")
        for queue_class in reversed(list(QueueClass))
    ]


def test_strict_starves_a_lower_class_while_a_higher_one_has_enough_L2() -> None:
    """The fault that the default is measured against."""
    p = strict()
    p.queued(job("batch", QueueClass.BATCH, wait=10**9), NOW)
    for i in range(1_000):
        now = NOW + i * 100
        worker(p, "w", now=now)
        p.queued(job(f"i{i}", queued=now), now)
        assert dispatched(p.decide(now)) == [f"i{i}"]
        p.ended(f"i{i}")


@pytest.mark.parametrize("make", [strict, fcfs])
def test_equal_times_are_served_in_order_of_arrival(make: Make) -> None:
    p = make()
    names = [f"r{i}" for i in range(20)]
    for name in names:
        p.queued(job(name), NOW)
    worker(p, "w")
    assert serve_all(p) == names


@pytest.mark.parametrize("make", [strict, fcfs])
def test_a_paused_class_is_not_served_and_the_others_are(make: Make) -> None:
    p = make()
    p.queued(job("batch", QueueClass.BATCH, queued=NOW - 10), NOW)
    p.queued(job("chat"), NOW)
    worker(p, "w", seqs=4)
    p.pause(frozenset({QueueClass.BATCH}))
    assert dispatched(p.decide(NOW)) == ["chat"]
    p.pause(frozenset())
    assert dispatched(p.decide(NOW)) == ["batch"]


@pytest.mark.parametrize("make", [strict, fcfs])
def test_the_worker_with_the_most_free_slots_is_chosen(make: Make) -> None:
    p = make()
    worker(p, "small", 0, seqs=2)
    worker(p, "busy", 1, seqs=8, running=7)
    worker(p, "big", 2, seqs=4)
    for i in range(7):
        p.queued(job(f"r{i}"), NOW)
    places = [(e.worker_id, e.slot) for e in p.decide(NOW) if isinstance(e, Dispatch)]
    assert dict(places) == {"small": 0, "busy": 1, "big": 2}
    assert [n for n, _ in places] == ["big", "big", "small", "big", "small", "busy", "big"]
    p.queued(job("no room"), NOW)
    assert p.decide(NOW) == []


@pytest.mark.parametrize("make", [strict, fcfs])
def test_choices_take_a_slot_each_and_nobody_overtakes_who_waits_for_room(make: Make) -> None:
    p = make()
    worker(p, "w", seqs=4)
    p.queued(job("one"), NOW)
    p.queued(job("four", n=4), NOW)
    p.queued(job("last"), NOW)
    assert serve_all(p) == ["one", "four", "last"]


@pytest.mark.parametrize("make", [strict, fcfs])
def test_a_request_wider_than_any_worker_gets_a_whole_one(make: Make) -> None:
    p = make()
    worker(p, "w", seqs=2)
    p.queued(job("one"), NOW)
    p.queued(job("eight", n=8), NOW)
    assert dispatched(p.decide(NOW)) == ["one"]
    p.ended("one")
    assert dispatched(p.decide(NOW)) == ["eight"]
