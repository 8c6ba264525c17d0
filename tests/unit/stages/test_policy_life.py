"""The life of requests, whatever the order: patience, losses, expiry, conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from contracts.tiers import QueueClass
from stages.policy import PolicyName, make_policy
from stages.policy.life import START_PATIENCE_LEASES
from stages.protocols import Dispatch, Expire, GiveUp, SchedulingPolicy
from tests.scheduling import LEASE, NOW, dispatched, job, scheduler_settings, worker

Make = Callable[..., SchedulingPolicy]


@pytest.fixture(params=get_args(PolicyName))
def make(request: pytest.FixtureRequest) -> Make:
    """Makes a policy; each test runs with every order."""
    return lambda **settings: make_policy(request.param, scheduler_settings(**settings), LEASE)


def test_a_worker_that_fell_silent_or_does_not_accept_gets_nothing(make: Make) -> None:
    p = make()
    worker(p, "silent", 0, now=NOW - 2_001)
    worker(p, "draining", 1, accepting=False)
    p.queued(job("r"), NOW)
    assert p.decide(NOW) == []
    worker(p, "silent", 0, now=NOW)
    assert dispatched(p.decide(NOW)) == ["r"]


def test_pools_do_not_share_workers_or_lines(make: Make) -> None:
    p = make()
    worker(p, "b0", pool="b")
    p.queued(job("a", pool="a"), NOW)
    p.queued(job("b", pool="b"), NOW)
    assert dispatched(p.decide(NOW)) == ["b"]


def test_what_others_gave_a_worker_counts_as_taken(make: Make) -> None:
    p = make()
    worker(p, "w", seqs=3, running=2)
    for i in range(3):
        p.queued(job(f"r{i}"), NOW)
    assert dispatched(p.decide(NOW)) == ["r0"]


def test_d5_l5_requests_past_their_deadline_are_expired_wherever_they_stand(make: Make) -> None:
    p = make()
    for i in range(50):
        p.queued(job(f"dead{i}", wait=1_000), NOW)
    p.queued(job("good", wait=60_000), NOW)
    later = NOW + 1_000
    worker(p, "w", now=later)
    effects = p.decide(later)
    assert {e.request_id for e in effects if isinstance(e, Expire)} == {f"dead{i}" for i in range(50)}
    assert dispatched(effects) == ["good"]
    assert sum(p.waiting().values()) == 0
    assert p.decide(later) == []


def test_a_known_request_is_not_queued_twice(make: Make) -> None:
    p = make()
    worker(p, "w", seqs=4)
    p.queued(job("r"), NOW)
    p.queued(job("r"), NOW)
    assert dispatched(p.decide(NOW)) == ["r"]
    p.queued(job("r"), NOW)
    assert p.decide(NOW) == []


def test_an_undelivered_dispatch_is_back_at_its_place_with_a_larger_attempt(make: Make) -> None:
    p = make()
    worker(p, "w")
    p.queued(job("first"), NOW)
    p.queued(job("second"), NOW)
    assert p.decide(NOW) == [Dispatch("first", "w", 0, 1)]
    p.undelivered("first", NOW)
    assert p.decide(NOW) == [Dispatch("first", "w", 0, 2)]


def in_flight(p: SchedulingPolicy, name: str = "r") -> None:
    worker(p, "w0", 0)
    p.queued(job(name), NOW)
    assert p.decide(NOW) == [Dispatch(name, "w0", 0, 1)]


def test_i2_a_lapsed_lease_dispatches_again_to_another_worker(make: Make) -> None:
    p = make()
    in_flight(p)
    later = NOW + LEASE
    worker(p, "w0", 0, now=later)
    worker(p, "w1", 1, now=later)
    assert p.to_probe(later) == ["r"]
    p.probed("r", None, 1, later)
    assert p.decide(later) == [Dispatch("r", "w1", 1, 2)]


def test_a_lapsed_lease_goes_back_to_the_same_worker_if_there_is_no_other(make: Make) -> None:
    p = make()
    in_flight(p)
    later = NOW + LEASE
    worker(p, "w0", 0, now=later)
    p.probed("r", None, 1, later)
    assert p.decide(later) == [Dispatch("r", "w0", 0, 2)]


def test_i4_a_live_lease_is_left_alone_however_long_it_takes(make: Make) -> None:
    p = make()
    in_flight(p)
    for i in range(1, 100):
        now = NOW + i * LEASE
        p.probed("r", "w0", 1, now)
        assert dispatched(p.decide(now)) == []
        assert p.to_probe(now + LEASE // 2 - 1) == ["r"]  # its worker is silent: asked at once
        worker(p, "w0", 0, running=1, now=now)
        assert p.to_probe(now + LEASE // 2 - 1) == []


def test_the_lease_is_not_expected_before_a_lease_has_passed(make: Make) -> None:
    p = make()
    in_flight(p)
    p.probed("r", None, 0, NOW + LEASE - 1)
    assert p.decide(NOW + LEASE - 1) == []


def test_a_living_worker_gets_longer_to_start_than_a_silent_one(make: Make) -> None:
    for alive in (True, False):
        p = make()
        in_flight(p)
        later = NOW + START_PATIENCE_LEASES * LEASE - 1
        worker(p, "w1", 1, now=later)
        if alive:
            worker(p, "w0", 0, now=later)
        p.probed("r", None, 0, later)
        assert dispatched(p.decide(later)) == ([] if alive else ["r"])


def test_a_request_that_lost_too_many_workers_is_given_up(make: Make) -> None:
    p = make(max_attempts=3)
    worker(p, "w", 0)
    p.queued(job("r"), NOW)
    now = NOW
    for attempt in range(1, 4):
        worker(p, "w", 0, now=now)
        assert p.decide(now) == [Dispatch("r", "w", 0, attempt)]
        now += LEASE
        p.probed("r", None, attempt, now)
    worker(p, "w", 0, now=now)
    assert p.decide(now) == [GiveUp("r")]
    assert p.decide(now + 10**6) == []


def test_i5_a_started_request_without_a_worker_outlives_its_deadline_and_is_then_given_up(
    make: Make,
) -> None:
    p = make()
    in_flight(p)
    lost_at = NOW + 70_000
    p.probed("r", None, 1, lost_at)
    assert p.decide(lost_at + 59_999) == []
    assert p.decide(lost_at + 60_000) == [GiveUp("r")]


def test_a_request_in_flight_does_not_expire(make: Make) -> None:
    p = make()
    in_flight(p)
    assert p.decide(NOW + 10**7) == []


def test_an_undelivered_request_past_its_deadline_is_expired_not_given_up(make: Make) -> None:
    p = make()
    in_flight(p)
    p.decide(NOW + 60_001)
    p.undelivered("r", NOW + 60_001)
    assert p.decide(NOW + 60_001) == [Expire("r")]


def test_an_adopted_request_is_watched_and_counts_at_its_worker(make: Make) -> None:
    p = make()
    worker(p, "w0", 0)
    p.queued(job("running"), NOW)
    p.adopted("running", "w0", 4, NOW)
    p.queued(job("next"), NOW)
    assert p.decide(NOW) == []
    later = NOW + LEASE
    worker(p, "w1", 1, now=later)
    p.probed("running", None, 4, later)
    assert Dispatch("running", "w1", 1, 5) in p.decide(later)


def test_an_orphan_is_dispatched_with_the_next_attempt_and_does_not_expire_meanwhile(make: Make) -> None:
    p = make()
    p.queued(job("r", queued=NOW - 59_000), NOW)
    p.orphaned("r", 2, NOW)
    later = NOW + 30_000
    assert p.decide(later) == []
    worker(p, "w", 0, now=later)
    assert p.decide(later) == [Dispatch("r", "w", 0, 3)]


def test_a_new_incarnation_in_a_slot_does_not_inherit_the_load_of_the_old_one(make: Make) -> None:
    p = make()
    in_flight(p)
    worker(p, "w0-again", 0, now=NOW + 100)
    p.queued(job("next"), NOW)
    assert p.decide(NOW + 100) == [Dispatch("next", "w0-again", 0, 1)]
    assert p.to_probe(NOW + 100) == ["r"]  # whose worker is gone


def test_reports_on_unknown_requests_change_nothing(make: Make) -> None:
    p = make()
    p.ended("x")
    p.undelivered("x", NOW)
    p.adopted("x", "w", 1, NOW)
    p.orphaned("x", 1, NOW)
    p.probed("x", None, 1, NOW)
    assert p.decide(NOW) == []
    assert p.in_flight() == 0


def test_waiting_counts_follow_every_road(make: Make) -> None:
    p = make()
    worker(p, "w", seqs=2)
    p.queued(job("a"), NOW)
    p.queued(job("b", QueueClass.BATCH, wait=500), NOW)
    p.queued(job("c", QueueClass.BATCH, n=2), NOW)
    assert p.waiting() == {QueueClass.INTERACTIVE: 1, QueueClass.STANDARD: 0, QueueClass.BATCH: 2}
    assert dispatched(p.decide(NOW)) == ["a", "b"]
    p.undelivered("b", NOW)
    assert p.waiting()[QueueClass.BATCH] == 2
    assert p.decide(NOW + 500) == [Expire("b")]
    p.ended("c")
    assert sum(p.waiting().values()) == 0


def test_requests_of_a_conversation_run_one_after_another_in_order(make: Make) -> None:
    p = make()
    worker(p, "w", seqs=8)
    p.queued(job("second", conversation="c", queued=NOW + 1), NOW + 1)
    p.queued(job("first", conversation="c", queued=NOW), NOW + 1)
    p.queued(job("third", conversation="c", queued=NOW + 2), NOW + 2)
    p.queued(job("of another tenant", tenant="u", conversation="c", queued=NOW + 2), NOW + 2)
    p.queued(job("of none", queued=NOW + 2), NOW + 2)
    assert sorted(dispatched(p.decide(NOW + 2))) == ["first", "of another tenant", "of none"]
    p.ended("first")
    assert dispatched(p.decide(NOW + 2)) == ["second"]
    assert p.waiting()[QueueClass.INTERACTIVE] == 1
    p.ended("second")
    assert dispatched(p.decide(NOW + 2)) == ["third"]


def test_a_conversation_goes_on_when_its_next_request_has_expired(make: Make) -> None:
    p = make()
    p.queued(job("first", conversation="c", wait=500), NOW)
    p.queued(job("second", conversation="c", queued=NOW + 1), NOW + 1)
    worker(p, "w", now=NOW + 500)
    assert p.decide(NOW + 500) == [Expire("first"), Dispatch("second", "w", 0, 1)]


def test_a_request_that_lost_its_worker_still_comes_before_the_next_of_its_conversation(
    make: Make,
) -> None:
    p = make()
    in_flight_of_two(p)
    p.orphaned("first", 1, NOW)
    assert p.decide(NOW) == [Dispatch("first", "w", 0, 2)]


def test_an_adopted_request_holds_up_the_rest_of_its_conversation(make: Make) -> None:
    p = make()
    worker(p, "w", seqs=8)
    p.queued(job("first", conversation="c"), NOW)
    p.queued(job("second", conversation="c", queued=NOW + 1), NOW + 1)
    p.adopted("second", "w", 1, NOW + 1)
    assert p.decide(NOW + 1) == []
    p.ended("second")
    assert dispatched(p.decide(NOW + 1)) == ["first"]


def in_flight_of_two(p: SchedulingPolicy) -> None:
    worker(p, "w", seqs=8)
    p.queued(job("first", conversation="c"), NOW)
    p.queued(job("second", conversation="c", queued=NOW + 1), NOW + 1)
    assert p.decide(NOW + 1) == [Dispatch("first", "w", 0, 1)]


def test_workers_that_never_began_do_not_count_as_lost_by_the_request(make: Make) -> None:
    p = make(max_attempts=1)
    in_flight(p)
    now = NOW
    for attempt in range(2, 6):
        now += START_PATIENCE_LEASES * LEASE
        p.probed("r", None, 0, now)
        worker(p, "w0", 0, now=now)
        assert p.decide(now) == [Dispatch("r", "w0", 0, attempt)]
