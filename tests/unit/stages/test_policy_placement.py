"""The default order inside a class, and placement: prompts, prefixes, KV room, overtaking."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.tiers import QueueClass
from contracts.worker_events import WorkerEvent
from stages.policy import make_policy
from stages.policy.fleet import Fleet
from stages.policy.prefixes import PREFIXES_PER_WORKER, PrefixIndex
from stages.protocols import SchedulingPolicy
from tests.scheduling import LEASE, NOW, dispatched, job, placed, scheduler_settings, serve_all, worker

XYZ = ("x", "y", "z")


def fair(**chosen: object) -> SchedulingPolicy:
    return make_policy("fair", scheduler_settings(**chosen), LEASE)


def test_a_prompt_goes_to_the_worker_with_the_least_prefill_ahead() -> None:
    p = fair()
    worker(p, "w0", 0, seqs=9, prefill_tokens=900)
    worker(p, "w1", 1, seqs=9, prefill_tokens=100)
    p.queued(job("a", prompt=1_000), NOW)
    p.queued(job("b", prompt=10), NOW)
    assert placed(p.decide(NOW)) == {"a": "w1", "b": "w0"}


def test_with_equal_prefill_the_emptier_worker_is_taken() -> None:
    p = fair()
    worker(p, "w0", 0, seqs=8, running=6)
    worker(p, "w1", 1, seqs=8, running=1)
    p.queued(job("a"), NOW)
    assert placed(p.decide(NOW)) == {"a": "w1"}


def test_the_worker_with_the_longest_prefix_is_taken_unless_it_is_too_busy() -> None:
    p = fair()
    for i in range(12):
        worker(p, f"w{i}", i, seqs=8)
    worker(p, "w10", 10, seqs=8, running=4, prefixes=["x"])
    worker(p, "w11", 11, seqs=8, running=4, prefixes=["x", "y", "z"])
    p.queued(job("a", prompt=800, prefix=XYZ), NOW)
    assert placed(p.decide(NOW)) == {"a": "w11"}
    worker(p, "w11", 11, seqs=8, running=4, prefill_tokens=2_000)
    p.queued(job("b", prompt=800, prefix=XYZ), NOW)
    assert placed(p.decide(NOW))["b"] != "w11"


def test_a_prefix_that_is_gone_or_whose_worker_is_gone_attracts_nobody() -> None:
    p = fair()
    worker(p, "w0", 0, seqs=8)
    worker(p, "w1", 1, seqs=8, running=2, prefixes=list(XYZ))
    worker(p, "w1", 1, seqs=8, running=2, prefixes_gone=list(XYZ))
    p.queued(job("a", prompt=800, prefix=XYZ), NOW)
    assert placed(p.decide(NOW)) == {"a": "w0"}
    worker(p, "w1", 1, seqs=8, prefixes=list(XYZ))
    worker(p, "w1.again", 1, seqs=8, running=7, now=NOW + 100)
    worker(p, "w0", 0, seqs=8, running=1, now=NOW + 100)
    p.queued(job("b", prompt=800, prefix=XYZ), NOW + 100)
    assert placed(p.decide(NOW + 100)) == {"b": "w0"}


def test_who_was_just_sent_a_prefix_gets_the_next_prompt_with_it() -> None:
    p = fair()
    worker(p, "w0", 0, seqs=64, prefixes=["other"])
    worker(p, "w1", 1, seqs=64, prefixes=["another"])
    p.queued(job("a", prompt=1_000, prefix=XYZ), NOW)
    first = placed(p.decide(NOW))["a"]
    worker(p, first, int(first[1]), seqs=64, running=1, now=NOW + 100)
    p.queued(job("b", prompt=1_000, prefix=XYZ), NOW + 100)
    assert placed(p.decide(NOW + 100)) == {"b": first}


def test_a_worker_that_fell_silent_leaves_the_choice_with_its_prefixes() -> None:
    p = fair()
    worker(p, "w0", 0, seqs=8, prefixes=list(XYZ), now=NOW - 2_001)
    worker(p, "w1", 1, seqs=8, running=7)
    p.queued(job("a", prompt=800, prefix=XYZ), NOW)
    assert placed(p.decide(NOW)) == {"a": "w1"}


def test_prefixes_of_a_worker_are_bounded_and_forgotten_with_it() -> None:
    index = PrefixIndex()
    names = [str(i) for i in range(PREFIXES_PER_WORKER + 10)]
    index.update("w", names, [])
    assert index.held_tokens("w", names[:1]) == 0
    assert index.held_tokens("w", names[10:12]) == 512
    index.forget("w")
    assert not index


def test_prefixes_are_forgotten_when_another_worker_has_the_slot() -> None:
    fleet = Fleet(lambda _: 0.0, "", 2_000)
    event = WorkerEvent(worker_id="w", slot=0, sent_ms=0, max_seqs=1, running=0, prefixes=["x"])
    fleet.seen(event, lambda _: 0, NOW)
    assert list(fleet.prefixes.holders(["x"])) == ["w"]
    fleet.seen(event.model_copy(update={"worker_id": "v", "prefixes": []}), lambda _: 0, NOW)
    assert not fleet.prefixes


def test_no_more_prompt_tokens_are_in_prefill_than_allowed() -> None:
    p = fair(prefill_tokens_per_worker=1_000)
    worker(p, "w", seqs=64)
    for i in range(10):
        p.queued(job(f"r{i}", prompt=400), NOW)
    assert len(dispatched(p.decide(NOW))) == 2
    worker(p, "w", seqs=64, running=2, now=NOW + 20, prefill_tokens=800)
    assert dispatched(p.decide(NOW + 20)) == []
    worker(p, "w", seqs=64, running=2, now=NOW + 100, prefill_tokens=300)
    assert len(dispatched(p.decide(NOW + 100))) == 1


def test_a_report_that_crossed_a_dispatch_does_not_hide_it() -> None:
    p = fair(prefill_tokens_per_worker=1_000)
    worker(p, "w", seqs=64)
    p.queued(job("a", prompt=900), NOW)
    assert dispatched(p.decide(NOW)) == ["a"]
    worker(p, "w", seqs=64, now=NOW + 5, prefill_tokens=0)
    p.queued(job("b", prompt=900), NOW)
    assert dispatched(p.decide(NOW + 5)) == []


def test_a_longer_prompt_than_allowed_goes_alone_and_shorter_ones_pass_meanwhile() -> None:
    p = fair(prefill_tokens_per_worker=1_000)
    worker(p, "w0", 0, seqs=64, prefill_tokens=10)
    worker(p, "w1", 1, seqs=64, prefill_tokens=10)
    p.queued(job("long", prompt=5_000), NOW)
    p.queued(job("short", prompt=100, queued=NOW + 1), NOW + 1)
    assert dispatched(p.decide(NOW + 1)) == ["short"]
    worker(p, "w1", 1, seqs=64, now=NOW + 100)
    assert placed(p.decide(NOW + 100)) == {"long": "w1"}
    p.queued(job("next", prompt=100, queued=NOW + 100), NOW + 100)
    assert placed(p.decide(NOW + 100)) == {"next": "w0"}


def test_a_prompt_that_does_not_fit_is_passed_so_often_and_then_a_worker_is_kept_for_it() -> None:
    p = fair(prefill_tokens_per_worker=1_000, max_overtakes=5)
    worker(p, "w0", 0, seqs=8, prefill_tokens=10)
    worker(p, "w1", 1, seqs=8, prefill_tokens=10)
    p.queued(job("long", prompt=5_000), NOW)
    p.queued(job("s1", tenant="a", prompt=100), NOW)
    for i in range(20):
        p.queued(job(f"s{i + 2}", tenant="ab"[i % 2], prompt=100), NOW)
    first = placed(p.decide(NOW))
    # After five have passed, one of the two workers is kept: all others go to the second one.
    assert "long" not in first
    later = list(first.values())[6:]
    assert len(set(later)) == 1
    kept = ({"w0", "w1"} - set(later)).pop()
    worker(p, kept, int(kept[1]), seqs=8, now=NOW + 100)
    assert placed(p.decide(NOW + 100))["long"] == kept


def test_a_wide_request_does_not_wait_for_ever_for_slots_that_become_free_one_by_one() -> None:
    p = fair(max_overtakes=4)
    worker(p, "w", seqs=4)
    for i in range(3):
        p.queued(job(f"first{i}"), NOW)
    assert len(dispatched(p.decide(NOW))) == 3
    p.queued(job("wide", n=4), NOW)
    running = ["first0", "first1", "first2"]
    served = 0
    for i in range(100):
        now = NOW + i
        p.queued(job(f"s{i}", tenant="s", queued=now), now)
        p.ended(running.pop(0)) if running else None
        names = dispatched(p.decide(now))
        if "wide" in names:
            break
        running += names
        served += len(names)
    assert not p.is_waiting("wide")
    assert served <= 4


def test_a_worker_is_kept_for_who_is_next_and_has_fitted_nowhere_for_a_second() -> None:
    p = fair(prefill_tokens_per_worker=1_000)
    p.queued(job("long", prompt=5_000), NOW)
    for now in (NOW, NOW + 1_000):
        for slot in (0, 1):
            worker(p, f"w{slot}", slot, seqs=8, prefill_tokens=10, now=now)
        assert p.decide(now) == []
    for i in range(4):
        p.queued(job(f"short{i}", prompt=100), NOW + 1_000)
    assert len(set(placed(p.decide(NOW + 1_000)).values())) == 1


def test_a_kept_worker_that_dies_is_replaced_by_another_one() -> None:
    p = fair(prefill_tokens_per_worker=1_000, max_overtakes=0)
    worker(p, "w0", 0, seqs=8, prefill_tokens=10)
    p.queued(job("long", prompt=5_000), NOW)
    assert p.decide(NOW) == []
    worker(p, "w1", 1, seqs=8, prefill_tokens=20, now=NOW + 2_500)
    assert p.decide(NOW + 2_500) == []
    worker(p, "w1", 1, seqs=8, now=NOW + 2_600)
    assert placed(p.decide(NOW + 2_600)) == {"long": "w1"}


def test_a_kept_worker_is_free_again_when_its_request_has_gone() -> None:
    p = fair(prefill_tokens_per_worker=1_000, max_overtakes=0)
    worker(p, "w", seqs=8, prefill_tokens=10)
    p.queued(job("long", prompt=5_000), NOW)
    p.queued(job("short"), NOW)
    assert p.decide(NOW) == []
    p.ended("long")
    assert dispatched(p.decide(NOW)) == ["short"]


def test_kv_room_counts_prompt_and_reply_and_an_idle_worker_has_room_for_anything() -> None:
    p = fair()
    worker(p, "w", seqs=8, running=1, kv_tokens_total=1_000, kv_tokens_free=500)
    p.queued(job("big", prompt=300, output=300), NOW)
    p.queued(job("a", tenant="a", prompt=200, output=100), NOW)
    p.queued(job("b", tenant="b", prompt=200, output=100), NOW)
    assert dispatched(p.decide(NOW)) == ["a"]
    q = fair()
    worker(q, "w", seqs=8, kv_tokens_total=1_000, kv_tokens_free=990)
    q.queued(job("huge", prompt=900, output=300), NOW)
    assert dispatched(q.decide(NOW)) == ["huge"]


def test_a_cached_prefix_lets_a_request_pass_but_not_too_often() -> None:
    p = fair(max_overtakes=3, locality_quantum=10**6)
    worker(p, "w", prefixes=list(XYZ))
    p.queued(job("cold", prompt=800), NOW)
    for i in range(10):
        p.queued(job(f"warm{i}", tenant="w", prompt=800, prefix=XYZ), NOW)
    assert serve_all(p)[:5] == ["warm0", "warm1", "warm2", "cold", "warm3"]


def test_a_tenant_may_not_be_ahead_by_more_than_the_quantum_for_its_prefixes() -> None:
    p = fair(max_overtakes=100, locality_quantum=2_000)
    worker(p, "w", prefixes=list(XYZ))
    for i in range(10):
        p.queued(job(f"cold{i}", tenant="c", prompt=800), NOW)
        p.queued(job(f"warm{i}", tenant="w", prompt=800, prefix=XYZ), NOW)
    assert serve_all(p)[:6] == ["warm0", "warm1", "warm2", "cold0", "warm3", "cold1"]


def test_without_a_quantum_only_requests_of_the_next_tenant_pass_for_their_prefix() -> None:
    p = fair(locality_quantum=0)
    worker(p, "w", prefixes=list(XYZ))
    p.queued(job("cold", tenant="a", prompt=800), NOW)
    p.queued(job("warm", tenant="a", prompt=800, prefix=XYZ), NOW)
    p.queued(job("other", tenant="b", prompt=800, prefix=XYZ), NOW - 1)
    assert serve_all(p)[0] == "warm"


@settings(max_examples=100, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(
            st.sampled_from(list(QueueClass)),
            st.sampled_from("abcd"),
            st.sampled_from([50, 400, 3_000]),
            st.sampled_from([(), ("x",), XYZ]),
            st.integers(1, 3),
        ),
        max_size=60,
    ),
    limit=st.integers(0, 4),
)
def test_nobody_is_passed_by_a_later_request_of_its_tenant_and_class_more_often_than_allowed(
    arrivals: list[tuple[QueueClass, str, int, tuple[str, ...], int]], limit: int
) -> None:
    p = fair(max_overtakes=limit, prefill_tokens_per_worker=1_000)
    worker(p, "w0", 0, seqs=3, prefixes=list(XYZ))
    jobs = {
        f"r{i:03d}": job(f"r{i:03d}", c, tenant=t, prompt=size, prefix=prefix, n=n, queued=NOW + i)
        for i, (c, t, size, prefix, n) in enumerate(arrivals)
    }
    passed = dict.fromkeys(jobs, 0)
    for one in jobs.values():
        p.queued(one, NOW + 100)
    served: list[str] = []
    now = NOW + 100
    while len(served) < len(jobs):
        now += 100
        worker(p, "w0", 0, seqs=3, now=now)
        names = dispatched(p.decide(now))
        assert names, "a worker without work serves nobody"
        for name in names:
            served.append(name)
            for other, one in jobs.items():
                same = (one.tenant, one.queue_class) == (jobs[name].tenant, jobs[name].queue_class)
                if other < name and other not in served and same:
                    passed[other] += 1
            p.ended(name)
    assert max(passed.values(), default=0) <= limit
