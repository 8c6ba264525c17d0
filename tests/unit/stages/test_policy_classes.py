"""The default order between classes: shares, ageing, reserved slots, pauses, preemption, grants."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from contracts.tiers import QueueClass
from stages.policy import make_policy
from stages.policy.life import Policy
from stages.protocols import Dispatch, Expire, Preempt, SchedulingPolicy
from tests.scheduling import (
    AGEING,
    LEASE,
    NOW,
    dispatched,
    job,
    scheduler_settings,
    serve_all,
    worker,
)

INTERACTIVE, STANDARD, BATCH = QueueClass


def fair(scheduler_id: str = "", **settings: object) -> SchedulingPolicy:
    return make_policy("fair", scheduler_settings(**settings), LEASE, scheduler_id)


def backlog(p: SchedulingPolicy, each: int, classes: list[QueueClass], now: int = NOW) -> None:
    for queue_class in classes:
        for i in range(each):
            p.queued(job(f"{queue_class}{i}", queue_class, queued=now), now)


def classes_of(names: list[str]) -> Counter[str]:
    return Counter(name.rstrip("0123456789") for name in names)


def test_classes_share_by_weight_while_all_wait() -> None:
    p = fair()
    worker(p, "w")
    backlog(p, 100, list(QueueClass))
    assert classes_of(serve_all(p)[:130]) == {"interactive": 80, "standard": 40, "batch": 10}


def test_what_a_class_does_not_take_goes_to_the_others() -> None:
    p = fair()
    worker(p, "w")
    backlog(p, 50, [STANDARD, BATCH])
    served = serve_all(p)
    assert classes_of(served[:50]) == {"standard": 40, "batch": 10}
    assert len(served) == 100


def test_a_class_that_was_away_earns_nothing_by_it() -> None:
    p = fair()
    worker(p, "w")
    for i in range(200):
        p.queued(job(f"early{i}", BATCH), NOW)
    for _ in range(100):
        (name,) = dispatched(p.decide(NOW))
        p.ended(name)
    backlog(p, 50, [INTERACTIVE, STANDARD])
    assert classes_of(serve_all(p)[:65]) == {"interactive": 40, "standard": 20, "early": 5}


def test_output_tokens_count_for_the_share_as_they_are_reported() -> None:
    p = fair(class_weights={"interactive": 1, "standard": 1})
    worker(p, "w")
    backlog(p, 40, [INTERACTIVE, STANDARD])
    served = Counter[str]()
    for _ in range(40):
        (name,) = dispatched(p.decide(NOW))
        tokens = 45 if name.startswith("interactive") else 0  # 10 + 2 x 45: ten times the cost
        worker(p, "w", running=1, generated={name: tokens})
        p.ended(name)
        worker(p, "w")
        served[name.rstrip("0123456789")] += 1
    assert served["standard"] == pytest.approx(10 * served["interactive"], abs=5)


def test_every_class_progresses_under_endless_load_of_a_higher_one_L2() -> None:
    p = fair()
    p.queued(job("batch", BATCH, wait=10**9), NOW)
    p.queued(job("standard", STANDARD, wait=10**9), NOW)
    for i in range(20):
        now = NOW + i * 100
        worker(p, "w", now=now)
        p.queued(job(f"i{i}a", queued=now), now)
        p.queued(job(f"i{i}b", queued=now), now)
        for name in dispatched(p.decide(now)):
            p.ended(name)
    assert not p.is_waiting("batch")
    assert not p.is_waiting("standard")


def test_with_hardly_any_weight_ageing_still_brings_a_class_forward_L2() -> None:
    """One in eight dispatches of a class may go to one that ageing has lifted to it."""
    p = fair(class_weights={"interactive": 1e6, "batch": 1e-6})
    now = NOW
    for i in range(400):
        p.queued(job(f"chat{i}", wait=10**9), NOW)
    for i in range(2):
        p.queued(job(f"batch{i}", BATCH, wait=10**9), NOW)
    while p.is_waiting("batch1"):
        now += 100
        worker(p, "w", now=now)
        for name in dispatched(p.decide(now)):
            p.ended(name)
    assert 0 <= now - (NOW + 2 * AGEING * 1_000) <= 1_000


def test_lower_classes_leave_the_reserved_slots_alone_and_higher_ones_take_them_L1() -> None:
    p = fair(reserved_slots={"interactive": 0.25, "standard": 0.25})
    worker(p, "w", seqs=8)
    backlog(p, 20, [BATCH])
    assert len(dispatched(p.decide(NOW))) == 4
    backlog(p, 20, [STANDARD])
    assert classes_of(dispatched(p.decide(NOW))) == {"standard": 2}
    backlog(p, 1, [INTERACTIVE])
    assert dispatched(p.decide(NOW)) == ["interactive0"]


@pytest.mark.parametrize("first", [STANDARD, BATCH])
def test_all_classes_below_one_leave_its_slots_free_together_L1(first: QueueClass) -> None:
    p = fair(reserved_slots={"interactive": 0.25})
    worker(p, "w", seqs=8)
    backlog(p, 4, [first])
    assert len(dispatched(p.decide(NOW))) == 4
    backlog(p, 20, [BATCH if first is STANDARD else STANDARD])
    assert len(dispatched(p.decide(NOW))) == 2
    backlog(p, 2, [INTERACTIVE])
    assert classes_of(dispatched(p.decide(NOW))) == {"interactive": 2}


def test_reserved_slots_leave_a_lower_class_one_slot_at_least() -> None:
    p = fair(reserved_slots={"interactive": 0.99, "standard": 0.99})
    worker(p, "w", seqs=2)
    backlog(p, 3, [BATCH])
    assert len(dispatched(p.decide(NOW))) == 1


def test_a_small_pool_reserves_nothing_by_default() -> None:
    p = fair(reserved_slots={"interactive": 0.05})
    worker(p, "w", seqs=19)
    backlog(p, 30, [BATCH])
    assert len(dispatched(p.decide(NOW))) == 19


def test_a_request_wider_than_its_class_may_have_is_served_all_the_same() -> None:
    p = fair(reserved_slots={"interactive": 0.5})
    worker(p, "w", seqs=4)
    p.queued(job("wide", BATCH, n=4), NOW)
    assert dispatched(p.decide(NOW)) == ["wide"]


def test_a_paused_class_waits_expires_and_catches_up_on_nothing() -> None:
    p = fair()
    worker(p, "w")
    p.pause(frozenset({BATCH}))
    backlog(p, 100, [BATCH, STANDARD])
    p.queued(job("late", BATCH, wait=500), NOW)
    for _ in range(50):
        (name,) = dispatched(p.decide(NOW))
        assert name.startswith("standard")
        p.ended(name)
    assert p.decide(NOW + 500)[0] == Expire("late")
    p.ended("late")
    p.ended("standard50")
    p.pause(frozenset())
    assert classes_of(serve_all(p, NOW + 500)[:50]) == {"standard": 40, "batch": 10}


def full_of_batch(p: SchedulingPolicy, seqs: int = 4) -> None:
    worker(p, "w", seqs=seqs)
    backlog(p, seqs, [BATCH])
    assert len(dispatched(p.decide(NOW))) == seqs


def preempted(p: SchedulingPolicy, now: int) -> list[str]:
    return [e.request_id for e in p.decide(now) if isinstance(e, Preempt)]


def test_a_batch_reply_gives_its_slot_up_for_a_chat_that_waits_and_resumes_once_L1() -> None:
    p = fair()
    full_of_batch(p)
    worker(p, "w", seqs=4, running=4, generated={"batch0": 9, "batch1": 3, "batch2": 9, "batch3": 9})
    p.queued(job("chat"), NOW)
    assert p.decide(NOW + 249) == []
    assert p.decide(NOW + 250) == [Preempt("batch1", "w", 0)]
    assert p.decide(NOW + 251) == []
    worker(p, "w", seqs=4, running=3, now=NOW + 252)
    p.orphaned("batch1", 0, NOW + 252)
    assert dispatched(p.decide(NOW + 252)) == ["chat"]
    assert p.is_waiting("batch1")
    p.ended("chat")
    worker(p, "w", seqs=4, running=3, now=NOW + 300)
    assert p.decide(NOW + 300) == [Dispatch("batch1", "w", 0, 2)]


def test_one_batch_reply_is_preempted_for_each_needed_slot_L1() -> None:
    p = fair()
    full_of_batch(p, 8)
    p.queued(job("two", n=2), NOW)
    p.queued(job("one"), NOW)
    assert len(preempted(p, NOW + 250)) == 3
    assert preempted(p, NOW + 1_000) == []


def test_a_reply_that_no_other_worker_could_continue_keeps_its_slot_L1() -> None:
    p = fair()
    worker(p, "w", seqs=2)
    p.queued(replace(job("schema", BATCH), continues=False), NOW)
    p.queued(job("text", BATCH), NOW)
    assert len(dispatched(p.decide(NOW))) == 2
    worker(p, "w", seqs=2, running=2, generated={"schema": 1, "text": 9})
    p.queued(job("chat"), NOW)
    assert preempted(p, NOW + 250) == ["text"]


def test_a_chat_gets_the_slot_that_was_freed_for_it_whatever_the_shares_say_L1() -> None:
    p = fair(class_weights={"interactive": 0.001, "batch": 1_000})
    worker(p, "w")
    p.queued(job("earlier"), NOW)
    assert serve_all(p) == ["earlier"]
    full_of_batch(p, 1)
    p.queued(job("more", BATCH), NOW)
    p.queued(job("chat"), NOW)
    assert preempted(p, NOW + 250) == ["batch0"]
    worker(p, "w", now=NOW + 260)
    p.orphaned("batch0", 0, NOW + 260)
    assert dispatched(p.decide(NOW + 260)) == ["chat"]


def test_what_batch_was_given_while_chats_waited_is_its_share_and_not_taken_back_L2() -> None:
    p = fair(class_weights={"interactive": 0.001, "batch": 1_000})
    backlog(p, 2, [INTERACTIVE, BATCH])
    worker(p, "w", seqs=2)
    assert sorted(dispatched(p.decide(NOW))) == ["batch0", "interactive0"]
    assert preempted(p, NOW + 1_000) == []


def test_a_reply_is_preempted_so_often_and_then_runs_to_its_end() -> None:
    p = fair(max_preemptions=2)
    now = NOW
    p.queued(job("batch", BATCH, wait=10**6), NOW)
    for round_ in range(3):
        worker(p, "w", now=now)
        assert dispatched(p.decide(now)) == ["batch"]
        p.queued(job(f"chat{round_}", queued=now), now)
        now += 250
        worker(p, "w", running=1, now=now)
        if round_ == 2:
            assert p.decide(now) == []
            break
        assert preempted(p, now) == ["batch"]
        worker(p, "w", now=now)
        p.orphaned("batch", 0, now)
        assert dispatched(p.decide(now)) == [f"chat{round_}"]
        p.ended(f"chat{round_}")


def test_preemption_is_no_loss() -> None:
    p = fair(max_attempts=1)
    full_of_batch(p, 1)
    p.queued(job("chat"), NOW)
    assert preempted(p, NOW + 250) == ["batch0"]
    p.orphaned("batch0", 1, NOW + 260)
    worker(p, "w", now=NOW + 260)
    assert dispatched(p.decide(NOW + 260)) == ["chat"]
    p.ended("chat")
    worker(p, "w", now=NOW + 270)
    assert dispatched(p.decide(NOW + 270)) == ["batch0"]


def test_nobody_is_preempted_while_a_slot_is_free_or_by_lower_classes() -> None:
    p = fair()
    full_of_batch(p)
    p.queued(job("standard", STANDARD), NOW)
    assert preempted(p, NOW + 9_000) == []
    p.ended("batch0")
    p.ended("batch1")
    worker(p, "w", seqs=4, running=2, now=NOW + 9_000)
    p.queued(job("chat", queued=NOW), NOW + 9_000)
    effects = p.decide(NOW + 9_000)
    assert sorted(dispatched(effects)) == ["chat", "standard"]
    assert not [e for e in effects if isinstance(e, Preempt)]


def test_batch_replies_give_up_kv_room_one_after_another_until_a_chat_fits_L1() -> None:
    p = fair()
    worker(p, "w", seqs=64, kv_tokens_total=1_000, kv_tokens_free=1_000)
    backlog(p, 3, [BATCH])
    assert len(dispatched(p.decide(NOW))) == 3

    def report(now: int, kv_free: int, running: int) -> None:
        tokens = {"batch0": 9, "batch1": 3, "batch2": 6}
        worker(
            p,
            "w",
            seqs=64,
            running=running,
            now=now,
            kv_tokens_total=1_000,
            kv_tokens_free=kv_free,
            generated=tokens,
        )

    report(NOW, 100, 3)
    p.queued(job("chat", prompt=290), NOW)
    assert preempted(p, NOW) == []
    report(NOW + 1_000, 100, 3)
    assert preempted(p, NOW + 1_000) == ["batch1"]
    report(NOW + 1_500, 200, 2)
    p.orphaned("batch1", 1, NOW + 1_500)
    assert p.decide(NOW + 1_500) == []
    report(NOW + 2_000, 200, 2)
    assert preempted(p, NOW + 2_000) == ["batch2"]
    report(NOW + 2_100, 300, 1)
    p.orphaned("batch2", 1, NOW + 2_100)
    assert dispatched(p.decide(NOW + 2_100))[0] == "chat"


def test_a_wide_chat_gets_only_the_slots_that_it_lacks_L1() -> None:
    p = fair()
    worker(p, "w", seqs=8)
    backlog(p, 6, [BATCH])
    assert len(dispatched(p.decide(NOW))) == 6
    worker(p, "w", seqs=8, running=6, generated={"batch4": 0, **{f"batch{i}": 5 for i in (0, 1, 3, 5)}})
    p.queued(job("chat", n=4), NOW)
    assert p.decide(NOW) == []
    worker(p, "w", seqs=8, running=6, now=NOW + 1_000)
    asked = preempted(p, NOW + 1_000)
    assert sorted(asked) == ["batch2", "batch4"]
    for name in asked:
        p.orphaned(name, 1, NOW + 1_100)
    worker(p, "w", seqs=8, running=4, now=NOW + 1_100)
    assert dispatched(p.decide(NOW + 1_100)) == ["chat"]


def test_nobody_is_preempted_for_a_chat_that_only_waits_for_prompts_before_it() -> None:
    p = fair(prefill_tokens_per_worker=1_000)
    worker(p, "w", seqs=8)
    backlog(p, 3, [BATCH])
    assert len(dispatched(p.decide(NOW))) == 3
    p.queued(job("chat", prompt=5_000), NOW)
    for now in range(NOW, NOW + 5_000, 500):
        worker(p, "w", seqs=8, running=3, now=now, prefill_tokens=10)
        assert p.decide(now) == []


def test_a_scheduler_takes_only_what_a_worker_grants_it_L4() -> None:
    p = fair("me")
    worker(p, "w", seqs=8, credits={"me": 2, "other": 6})
    backlog(p, 8, [INTERACTIVE])
    first = dispatched(p.decide(NOW))
    assert len(first) == 2
    worker(p, "w", seqs=8, now=NOW, credits={"me": 2, "other": 6})  # it has crossed them on its way
    assert dispatched(p.decide(NOW)) == []
    credits = {"me": 1, "other": 5}
    worker(p, "w", seqs=8, running=2, now=NOW + 1, taken=first, credits=credits)
    assert len(dispatched(p.decide(NOW + 1))) == 1
    worker(p, "w", seqs=8, running=3, now=NOW + 2, credits={"other": 5})
    assert dispatched(p.decide(NOW + 2)) == []
    worker(p, "w", seqs=8, running=3, now=NOW + 3)
    assert len(dispatched(p.decide(NOW + 3))) == 5


def test_two_schedulers_never_take_more_together_than_a_worker_has_L4() -> None:
    pair = {name: fair(name) for name in ("a", "b")}
    given = 0
    for name, p in pair.items():
        worker(p, "w", seqs=8, credits={"a": 5, "b": 3})
        for i in range(10):
            p.queued(job(f"{name}{i}"), NOW)
        given += len(dispatched(p.decide(NOW)))
    assert given == 8


def test_settings_can_be_changed_while_requests_wait() -> None:
    p = fair()
    worker(p, "w")
    backlog(p, 100, [INTERACTIVE, BATCH])
    p.reconfigure(scheduler_settings(class_weights={"interactive": 1, "batch": 1}))
    assert classes_of(serve_all(p)[:40]) == {"interactive": 20, "batch": 20}


def test_expired_requests_leave_every_line_and_the_good_one_is_served_L5() -> None:
    p = fair()
    for i in range(1_000):
        p.queued(job(f"dead{i}", list(QueueClass)[i % 3], tenant=f"t{i % 7}", wait=1_000), NOW)
    p.queued(job("good", BATCH), NOW)
    later = NOW + 1_000
    worker(p, "w", now=later)
    effects = p.decide(later)
    assert sum(isinstance(e, Expire) for e in effects) == 1_000
    assert dispatched(effects) == ["good"]
    assert sum(p.waiting().values()) == 0


def test_what_has_ended_takes_no_memory_however_long_its_deadline() -> None:
    p = fair()
    worker(p, "w", seqs=64)
    for i in range(2_000):
        p.queued(job(f"r{i}", list(QueueClass)[i % 3], tenant=f"t{i}", wait=10**9), NOW)
        for name in dispatched(p.decide(NOW)):
            p.ended(name)
        worker(p, "w", seqs=64, now=NOW + i)
    assert isinstance(p, Policy)
    assert len(p._ends) < 200
