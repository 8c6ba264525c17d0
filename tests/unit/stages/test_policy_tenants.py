"""Fairness between the tenants of a class, and the bound of arXiv 2401.00588 (docs/SCHEDULING.md)."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from stages.policy import make_policy
from stages.policy.counters import VirtualCounters
from stages.protocols import SchedulingPolicy
from tests.scheduling import AGEING, LEASE, NOW, dispatched, job, scheduler_settings, serve_all, worker


def fair(**chosen: object) -> SchedulingPolicy:
    return make_policy("fair", scheduler_settings(**chosen), LEASE)


def queue(p: SchedulingPolicy, tenant: str, many: int, prompt: int = 10, now: int = NOW) -> None:
    for i in range(many):
        p.queued(job(f"{tenant}{now}-{i}", tenant=tenant, prompt=prompt, queued=now), now)


def tenants_of(names: list[str]) -> Counter[str]:
    return Counter(name[0] for name in names)


def test_a_tenant_that_floods_gets_no_more_than_the_others() -> None:
    p = fair()
    worker(p, "w")
    queue(p, "f", 500)
    queue(p, "a", 20)
    queue(p, "b", 20)
    assert tenants_of(serve_all(p)[:60]) == {"f": 20, "a": 20, "b": 20}


def test_shares_are_of_tokens_not_of_requests() -> None:
    p = fair()
    worker(p, "w")
    queue(p, "a", 100, prompt=100)
    queue(p, "b", 100, prompt=10)
    assert tenants_of(serve_all(p)[:88]) == {"a": 8, "b": 80}


def test_a_tenants_weight_multiplies_its_share() -> None:
    p = fair(tenant_weights={"a": 3})
    worker(p, "w")
    queue(p, "a", 100)
    queue(p, "b", 100)
    assert tenants_of(serve_all(p)[:80]) == {"a": 60, "b": 20}


def test_a_tenant_that_was_away_earns_nothing_by_it() -> None:
    p = fair()
    worker(p, "w")
    queue(p, "a", 100)
    queue(p, "b", 1)
    for _ in range(50):
        (name,) = dispatched(p.decide(NOW))
        p.ended(name)
    queue(p, "b", 100, now=NOW + 1)
    assert tenants_of(serve_all(p, NOW + 1)[:40]) == {"a": 20, "b": 20}


def test_requests_of_a_tenant_are_served_in_order() -> None:
    p = fair()
    worker(p, "w")
    for i in (3, 1, 2):
        p.queued(job(f"r{i}", queued=NOW + i), NOW + 5)
    assert serve_all(p) == ["r1", "r2", "r3"]


def test_ever_new_tenants_do_not_pass_one_that_has_waited_long_L2() -> None:
    p = fair()
    worker(p, "w")
    queue(p, "a", 2, prompt=5_000)
    p.queued(job("b", tenant="b"), NOW)
    p.queued(job("c", tenant="c"), NOW)
    assert dispatched(p.decide(NOW)) == [f"a{NOW}-0"]
    p.ended(f"a{NOW}-0")
    now = NOW
    for i in range(1, 1_000):
        now = NOW + 100 * i
        worker(p, "w", now=now)
        p.queued(job(f"new{i}", tenant=f"new{i}", queued=now), now)
        for name in dispatched(p.decide(now)):
            p.ended(name)
        if not p.is_waiting(f"a{NOW}-1"):
            break
    assert AGEING * 1_000 - 100 <= now - NOW <= AGEING * 1_000 + 1_000


def test_counters_of_idle_tenants_are_forgotten() -> None:
    counters: VirtualCounters[int] = VirtualCounters(lambda _: 1.0)
    for i in range(10_000):
        counters.activate(i)
        counters.charge(i, 1.0)
        counters.deactivate(i)
        counters.forget_idle(lambda _: False)
    assert len(counters._values) < 300


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 800), st.integers(1, 800)), min_size=1, max_size=8),
    replies=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8),
    slots=st.integers(1, 6),
    speeds=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    others=st.booleans(),
    steps=st.integers(20, 120),
)
def test_service_of_two_backlogged_tenants_differs_by_the_bound_at_most(
    prompts: list[tuple[int, int]],
    replies: list[tuple[int, int]],
    slots: int,
    speeds: list[int],
    others: bool,
    steps: int,
) -> None:
    """For any trace: U = w_p x longest prompt + w_q x output tokens in flight; in any interval 2 U.

    Outputs are charged one heartbeat late here, as in production.
    """
    p = fair(locality_quantum=0)
    names = ("a", "b") + (("c",) if others else ())
    made: Counter[str] = Counter()
    left: dict[str, int] = {}
    out: Counter[str] = Counter()
    reported: dict[str, int] = {}
    service: Counter[str] = Counter()
    gaps = [0]

    def queue_one(tenant: str) -> None:
        i = made[tenant]
        made[tenant] += 1
        column = tenant == "b"
        prompt = prompts[i % len(prompts)][column]
        reply = replies[i % len(replies)][column]
        name = f"{tenant}{i}"
        p.queued(job(name, tenant=tenant, prompt=prompt, output=reply), NOW)
        sizes[name] = prompt, reply

    sizes: dict[str, tuple[int, int]] = {}
    for tenant in names:
        for _ in range(slots + 1):
            queue_one(tenant)
    worker(p, "w", seqs=slots)
    for step in range(steps):
        now = NOW + 100 * step
        for name in dispatched(p.decide(now)):
            left[name] = sizes[name][1]
            service[name[0]] += sizes[name][0]
            if name[0] != "c" or step % 5 == 0:
                queue_one(name[0])
            gaps.append(service["a"] - service["b"])
        for j, name in enumerate(list(left)):
            more = min(left[name], speeds[(step + j) % len(speeds)])
            left[name] -= more
            out[name] += more
            service[name[0]] += 2 * more
        gaps.append(service["a"] - service["b"])
        over = [name for name, tokens in left.items() if tokens == 0]
        # What was reported is one heartbeat old, but for replies that end: those are settled.
        worker(
            p,
            "w",
            seqs=slots,
            running=len(left) - len(over),
            now=now,
            generated={**reported, **{name: out[name] for name in over}},
        )
        reported = {name: out[name] for name in left}
        for name in over:
            p.ended(name)
            del left[name]
            reported.pop(name)
    longest = max(max(pair) for pair in prompts)
    most = max(max(pair) for pair in replies)
    bound = longest + 2 * slots * most
    assert max(map(abs, gaps)) <= bound
    assert max(gaps) - min(gaps) <= 2 * bound
