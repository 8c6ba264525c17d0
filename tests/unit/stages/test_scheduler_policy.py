"""The policy's order, places and patience, one rule at a time."""

from __future__ import annotations

from contracts.tiers import QueueClass
from contracts.worker_events import WorkerEvent
from infra.settings import SchedulerSettings
from stages.protocols import Dispatch, Effect, Expire, GiveUp, Job
from stages.scheduler_policy import START_PATIENCE_LEASES, StrictPolicy

LEASE = 1_000
AGEING = 10
NOW = 1_000_000


def policy(**settings: int) -> StrictPolicy:
    chosen = {"ageing_seconds": AGEING, "worker_timeout_ms": 2_000, "max_attempts": 3, **settings}
    return StrictPolicy(SchedulerSettings.model_validate(chosen), LEASE)


def job(
    name: str,
    queue_class: QueueClass = QueueClass.INTERACTIVE,
    *,
    queued: int = NOW,
    wait: int = 60_000,
    n: int = 1,
    pool: str = "p",
) -> Job:
    return Job(name, queue_class, pool, "t", n, 10, queued, queued + wait)


def worker(
    p: StrictPolicy,
    name: str,
    slot: int = 0,
    *,
    seqs: int = 1,
    running: int = 0,
    now: int = NOW,
    accepting: bool = True,
    pool: str = "p",
) -> None:
    event = WorkerEvent(
        worker_id=name, slot=slot, sent_ms=0, max_seqs=seqs, running=running, accepting=accepting
    )
    p.worker_seen(pool, event, now)


def dispatched(effects: list[Effect]) -> list[str]:
    return [e.request_id for e in effects if isinstance(e, Dispatch)]


def serve_all(p: StrictPolicy, now: int = NOW) -> list[str]:
    """The order in which one slot serves everything that waits."""
    order: list[str] = []
    while names := dispatched(p.decide(now)):
        order += names
        for name in names:
            p.ended(name)
    return order


def test_classes_are_served_in_order_and_each_first_come_first_served() -> None:
    p = policy()
    for i, queue_class in enumerate(reversed(list(QueueClass))):
        p.queued(job(f"{queue_class}-late", queue_class, queued=NOW - 10 + i), NOW)
        p.queued(job(f"{queue_class}-early", queue_class, queued=NOW - 20 + i), NOW)
    worker(p, "w")
    assert serve_all(p) == [
        f"{queue_class}-{when}" for queue_class in QueueClass for when in ("early", "late")
    ]


def test_equal_times_are_served_in_order_of_arrival() -> None:
    p = policy()
    names = [f"r{i}" for i in range(20)]
    for name in names:
        p.queued(job(name), NOW)
    worker(p, "w")
    assert serve_all(p) == names


def test_l2_ageing_lifts_one_class_per_period_and_the_older_then_goes_first() -> None:
    p = policy()
    p.queued(job("fresh-interactive", queued=NOW), NOW)
    p.queued(job("batch-lifted-once", QueueClass.BATCH, queued=NOW - 11_000), NOW)
    p.queued(job("batch-lifted-twice", QueueClass.BATCH, queued=NOW - 21_000), NOW)
    p.queued(job("fresh-standard", QueueClass.STANDARD, queued=NOW), NOW)
    worker(p, "w")
    assert serve_all(p) == [
        "batch-lifted-twice",
        "fresh-interactive",
        "batch-lifted-once",
        "fresh-standard",
    ]


def test_l2_a_lower_class_does_not_starve_under_endless_higher_load() -> None:
    p = policy()
    p.queued(job("batch", QueueClass.BATCH, wait=10**9), NOW)
    now = NOW
    for i in range(1_000):
        now = NOW + i * 100
        worker(p, "w", now=now)
        p.queued(job(f"i{i}a", queued=now), now)
        p.queued(job(f"i{i}b", queued=now), now)
        names = dispatched(p.decide(now))
        if "batch" in names:
            break
        for name in names:
            p.ended(name)
    assert NOW + 2 * AGEING * 1_000 <= now <= NOW + 3 * AGEING * 1_000


def test_the_worker_with_the_most_free_slots_is_chosen() -> None:
    p = policy()
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


def test_choices_take_a_slot_each_and_nobody_overtakes_who_waits_for_room() -> None:
    p = policy()
    worker(p, "w", seqs=4)
    p.queued(job("one"), NOW)
    p.queued(job("four", n=4), NOW)
    p.queued(job("last"), NOW)
    assert dispatched(p.decide(NOW)) == ["one"]
    p.ended("one")
    assert dispatched(p.decide(NOW)) == ["four"]
    p.ended("four")
    assert dispatched(p.decide(NOW)) == ["last"]


def test_a_request_wider_than_any_worker_gets_a_whole_one() -> None:
    p = policy()
    worker(p, "w", seqs=2)
    p.queued(job("one"), NOW)
    p.queued(job("eight", n=8), NOW)
    assert dispatched(p.decide(NOW)) == ["one"]
    p.ended("one")
    assert dispatched(p.decide(NOW)) == ["eight"]


def test_a_worker_that_fell_silent_or_does_not_accept_gets_nothing() -> None:
    p = policy()
    worker(p, "silent", 0, now=NOW - 2_001)
    worker(p, "draining", 1, accepting=False)
    p.queued(job("r"), NOW)
    assert p.decide(NOW) == []
    worker(p, "silent", 0, now=NOW)
    assert dispatched(p.decide(NOW)) == ["r"]


def test_pools_do_not_share_workers_or_lines() -> None:
    p = policy()
    worker(p, "b0", pool="b")
    p.queued(job("a", pool="a"), NOW)
    p.queued(job("b", pool="b"), NOW)
    assert dispatched(p.decide(NOW)) == ["b"]


def test_what_others_gave_a_worker_counts_as_taken() -> None:
    p = policy()
    worker(p, "w", seqs=3, running=2)
    for i in range(3):
        p.queued(job(f"r{i}"), NOW)
    assert dispatched(p.decide(NOW)) == ["r0"]


def test_d5_l5_requests_past_their_deadline_are_expired_wherever_they_stand() -> None:
    p = policy()
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


def test_a_known_request_is_not_queued_twice() -> None:
    p = policy()
    worker(p, "w", seqs=4)
    p.queued(job("r"), NOW)
    p.queued(job("r"), NOW)
    assert dispatched(p.decide(NOW)) == ["r"]
    p.queued(job("r"), NOW)
    assert p.decide(NOW) == []


def test_an_undelivered_dispatch_is_back_at_its_place_with_a_larger_attempt() -> None:
    p = policy()
    worker(p, "w")
    p.queued(job("first"), NOW)
    p.queued(job("second"), NOW)
    assert p.decide(NOW) == [Dispatch("first", "w", 0, 1)]
    p.undelivered("first", NOW)
    assert p.decide(NOW) == [Dispatch("first", "w", 0, 2)]


def in_flight(p: StrictPolicy, name: str = "r") -> None:
    worker(p, "w0", 0)
    p.queued(job(name), NOW)
    assert p.decide(NOW) == [Dispatch(name, "w0", 0, 1)]


def test_i2_a_lapsed_lease_dispatches_again_to_another_worker() -> None:
    p = policy()
    in_flight(p)
    later = NOW + LEASE
    worker(p, "w0", 0, now=later)
    worker(p, "w1", 1, now=later)
    assert p.to_probe(later) == ["r"]
    p.probed("r", None, 1, later)
    assert p.decide(later) == [Dispatch("r", "w1", 1, 2)]


def test_a_lapsed_lease_goes_back_to_the_same_worker_if_there_is_no_other() -> None:
    p = policy()
    in_flight(p)
    later = NOW + LEASE
    worker(p, "w0", 0, now=later)
    p.probed("r", None, 1, later)
    assert p.decide(later) == [Dispatch("r", "w0", 0, 2)]


def test_i4_a_live_lease_is_left_alone_however_long_it_takes() -> None:
    p = policy()
    in_flight(p)
    for i in range(1, 100):
        now = NOW + i * LEASE
        p.probed("r", "w0", 1, now)
        assert dispatched(p.decide(now)) == []
        assert p.to_probe(now + LEASE // 2 - 1) == ["r"]  # its worker is silent: asked at once
        worker(p, "w0", 0, running=1, now=now)
        assert p.to_probe(now + LEASE // 2 - 1) == []


def test_the_lease_is_not_expected_before_a_lease_has_passed() -> None:
    p = policy()
    in_flight(p)
    p.probed("r", None, 0, NOW + LEASE - 1)
    assert p.decide(NOW + LEASE - 1) == []


def test_a_living_worker_gets_longer_to_start_than_a_silent_one() -> None:
    for alive in (True, False):
        p = policy()
        in_flight(p)
        later = NOW + START_PATIENCE_LEASES * LEASE - 1
        worker(p, "w1", 1, now=later)
        if alive:
            worker(p, "w0", 0, now=later)
        p.probed("r", None, 0, later)
        assert dispatched(p.decide(later)) == ([] if alive else ["r"])


def test_a_request_that_lost_too_many_workers_is_given_up() -> None:
    p = policy(max_attempts=3)
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


def test_i5_a_started_request_without_a_worker_outlives_its_deadline_and_is_then_given_up() -> None:
    p = policy()
    in_flight(p)
    lost_at = NOW + 70_000
    p.probed("r", None, 1, lost_at)
    assert p.decide(lost_at + 59_999) == []
    assert p.decide(lost_at + 60_000) == [GiveUp("r")]


def test_a_request_in_flight_does_not_expire() -> None:
    p = policy()
    in_flight(p)
    assert p.decide(NOW + 10**7) == []


def test_an_undelivered_request_past_its_deadline_is_expired_not_given_up() -> None:
    p = policy()
    in_flight(p)
    p.decide(NOW + 60_001)
    p.undelivered("r", NOW + 60_001)
    assert p.decide(NOW + 60_001) == [Expire("r")]


def test_an_adopted_request_is_watched_and_counts_at_its_worker() -> None:
    p = policy()
    worker(p, "w0", 0)
    p.queued(job("running"), NOW)
    p.adopted("running", "w0", 4, NOW)
    p.queued(job("next"), NOW)
    assert p.decide(NOW) == []
    later = NOW + LEASE
    worker(p, "w1", 1, now=later)
    p.probed("running", None, 4, later)
    assert Dispatch("running", "w1", 1, 5) in p.decide(later)


def test_an_orphan_is_dispatched_with_the_next_attempt_and_does_not_expire_meanwhile() -> None:
    p = policy()
    p.queued(job("r", queued=NOW - 59_000), NOW)
    p.orphaned("r", 2, NOW)
    later = NOW + 30_000
    assert p.decide(later) == []
    worker(p, "w", 0, now=later)
    assert p.decide(later) == [Dispatch("r", "w", 0, 3)]


def test_a_new_incarnation_in_a_slot_does_not_inherit_the_load_of_the_old_one() -> None:
    p = policy()
    in_flight(p)
    worker(p, "w0-again", 0, now=NOW + 100)
    p.queued(job("next"), NOW)
    assert p.decide(NOW + 100) == [Dispatch("next", "w0-again", 0, 1)]
    assert p.to_probe(NOW + 100) == ["r"]  # whose worker is gone


def test_reports_on_unknown_requests_change_nothing() -> None:
    p = policy()
    p.ended("x")
    p.undelivered("x", NOW)
    p.adopted("x", "w", 1, NOW)
    p.orphaned("x", 1, NOW)
    p.probed("x", None, 1, NOW)
    assert p.decide(NOW) == []
    assert p.in_flight() == 0


def test_waiting_counts_follow_every_road() -> None:
    p = policy()
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
