"""Routing by what the KV tier holds: what is known of it, and what a prompt costs at a worker."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contracts.worker_events import WorkerEvent
from kv.layout import CHUNK_TOKENS
from stages.policy import make_policy
from stages.policy.prefixes import TIER_PREFIXES, TierIndex
from stages.policy.worker import Worker
from stages.protocols import Dispatch, SchedulingPolicy
from tests.scheduling import LEASE, NOW, job, placed, scheduler_settings, worker

CHAIN = tuple("abcdefgh")
#: Loading takes a fifth of what prefill takes.
FAST = {"load_us_per_token": 20.0, "prefill_us_per_token": 100.0}


def fair(**chosen: object) -> SchedulingPolicy:
    return make_policy("fair", scheduler_settings(**chosen), LEASE)


def dispatch_of(policy: SchedulingPolicy, now: int = NOW) -> Dispatch:
    (effect,) = policy.decide(now)
    assert isinstance(effect, Dispatch)
    return effect


def test_the_tier_is_known_by_what_workers_found_and_missed_there() -> None:
    tier = TierIndex()
    assert not tier
    tier.update(["a", "b", "c"], [])
    assert tier.held_tokens(("a", "b", "c", "d")) == 3 * CHUNK_TOKENS
    assert tier.held_tokens(("x", "b")) == 0
    tier.update([], ["c", "never there"])
    assert tier.held_tokens(("a", "b", "c", "d")) == 2 * CHUNK_TOKENS


def test_a_prompt_that_was_given_to_a_worker_is_expected_in_the_tier_if_anybody_has_one() -> None:
    tier = TierIndex()
    tier.expect(("a", "b"))
    assert not tier
    tier.update(["x"], [])
    tier.expect(("a", "b"))
    assert tier.held_tokens(("a", "b")) == 2 * CHUNK_TOKENS


@pytest.mark.parametrize("use", ["found again", "dispatched"])
def test_what_was_used_last_is_remembered_longest(use: str) -> None:
    tier = TierIndex(room=2)
    tier.update(["old"], [])
    tier.update(["used"], [])
    if use == "dispatched":
        tier.expect(("old",))
    else:
        tier.update(["old"], [])
    tier.update(["new"], [])
    assert [tier.held_tokens((name,)) > 0 for name in ("old", "used", "new")] == [True, False, True]


def test_the_end_of_a_prompt_is_forgotten_before_its_start() -> None:
    tier = TierIndex(room=3)
    tier.update(["a", "b", "c"], [])
    tier.update(["x"], [])
    assert tier.held_tokens(("a", "b", "c")) == 2 * CHUNK_TOKENS


def test_its_memory_is_bounded() -> None:
    tier = TierIndex()
    for start in range(0, TIER_PREFIXES + 1_000, 128):
        tier.update([str(i) for i in range(start, start + 128)], [])
    assert len(tier) == TIER_PREFIXES


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["found", "missing", "expect"]),
            st.lists(st.sampled_from("abcdef"), unique=True),
        ),
        max_size=40,
    ),
    st.integers(1, 6),
)
@settings(deadline=None)
def test_it_holds_nothing_that_nobody_told_of_and_nothing_that_was_missing_last(
    steps: list[tuple[str, list[str]]], room: int
) -> None:
    tier = TierIndex(room)
    may: set[str] = set()
    for what, names in steps:
        match what:
            case "found":
                tier.update(names, [])
                may |= set(names)
            case "missing":
                tier.update([], names)
                may -= set(names)
            case _:
                may |= set(names) if tier else set()
                tier.expect(tuple(names))
        held = {name for name in "abcdef" if tier.held_tokens((name,))}
        assert held <= may
        assert len(held) == len(tier) == min(room, len(held))


@pytest.mark.parametrize(
    ("load", "prefill", "ratio"),
    [
        (20.0, 100.0, 0.2),
        (100.0, 100.0, 1.0),
        (300.0, 100.0, 1.0),
        (None, 100.0, 1.0),
        (20.0, None, 1.0),
        (0.0, 100.0, 1.0),
        (20.0, 0.0, 1.0),
        (-1.0, 100.0, 1.0),
        (math.nan, 100.0, 1.0),
    ],
)
def test_what_is_not_measured_or_slower_than_prefill_gains_nothing(
    load: float | None, prefill: float | None, ratio: float
) -> None:
    event = WorkerEvent(
        worker_id="w",
        slot=0,
        sent_ms=0,
        max_seqs=1,
        running=0,
        load_us_per_token=load,
        prefill_us_per_token=prefill,
    )
    one = Worker(0, "w")
    one.report(event, "", NOW)
    assert one.load_ratio == ratio


def test_a_dispatch_says_where_the_prompt_is_expected_to_come_from() -> None:
    p = fair()
    worker(p, "w", seqs=8, prefixes=list("ab"), tier_prefixes=list("abcd"), **FAST)
    p.queued(job("r", prompt=2_000, prefix=CHAIN[:7]), NOW)
    effect = dispatch_of(p)
    assert (effect.held_tokens, effect.tier_tokens) == (2 * CHUNK_TOKENS, 2 * CHUNK_TOKENS)


def test_who_loads_fast_from_the_tier_is_taken_before_who_would_have_to_compute() -> None:
    p = fair()
    worker(p, "w0", 0, seqs=8, tier_prefixes=list(CHAIN))
    worker(p, "w1", 1, seqs=8, **FAST)
    p.queued(job("r", prompt=2_100, prefix=CHAIN), NOW)
    assert placed(p.decide(NOW)) == {"r": "w1"}


def test_what_one_worker_was_sent_another_one_is_expected_to_load() -> None:
    p = fair()
    worker(p, "w0", 0, seqs=1, tier_prefixes=["other"], **FAST)
    worker(p, "w1", 1, seqs=1, running=1, **FAST)
    p.queued(job("first", prompt=2_100, prefix=CHAIN), NOW)
    assert dispatch_of(p).tier_tokens == 0
    worker(p, "w1", 1, seqs=1, now=NOW + 100, **FAST)
    p.queued(job("second", prompt=2_100, prefix=CHAIN), NOW + 100)
    effect = dispatch_of(p, NOW + 100)
    assert (effect.worker_id, effect.tier_tokens) == ("w1", 8 * CHUNK_TOKENS)


def test_a_worker_whose_loads_have_become_slow_is_no_longer_preferred() -> None:
    p = fair()
    worker(p, "w0", 0, seqs=8, tier_prefixes=list(CHAIN))
    worker(p, "w1", 1, seqs=8, **FAST)
    worker(p, "w1", 1, seqs=8, load_us_per_token=200.0, prefill_us_per_token=100.0)
    p.queued(job("r", prompt=2_100, prefix=CHAIN), NOW)
    assert placed(p.decide(NOW)) == {"r": "w0"}


def test_a_tier_that_has_lost_a_prefix_attracts_nobody() -> None:
    p = fair()
    worker(p, "w0", 0, seqs=8, tier_prefixes=list(CHAIN))
    worker(p, "w1", 1, seqs=8, tier_prefixes_gone=list(CHAIN), **FAST)
    p.queued(job("r", prompt=2_100, prefix=CHAIN), NOW)
    assert placed(p.decide(NOW)) == {"r": "w0"}


def test_a_busy_worker_that_holds_the_prefix_gives_way_to_one_that_loads_it() -> None:
    """Without the tier the wait behind 1,000 tokens would be shorter than computing 2,048 again."""
    for rates, expected in (({}, "w0"), (FAST, "w1")):
        p = fair()
        worker(p, "w0", 0, seqs=8, prefixes=list(CHAIN), prefill_tokens=1_000, **rates)
        worker(p, "w1", 1, seqs=8, tier_prefixes=list(CHAIN), **rates)
        p.queued(job("r", prompt=2_100, prefix=CHAIN), NOW)
        assert placed(p.decide(NOW)) == {"r": expected}


def test_a_prompt_that_is_mostly_loaded_leaves_room_for_others_in_prefill() -> None:
    for rates, served in (({}, 1), (FAST, 2)):
        p = fair(prefill_tokens_per_worker=2_500)
        worker(p, "w", seqs=8, tier_prefixes=list(CHAIN), **rates)
        p.queued(job("loaded", prompt=2_100, prefix=CHAIN), NOW)
        p.queued(job("computed", tenant="u", prompt=2_000), NOW)
        assert len(p.decide(NOW)) == served


def test_a_prompt_that_fits_nowhere_does_not_hold_back_one_of_its_size_that_is_loaded() -> None:
    p = fair(prefill_tokens_per_worker=2_500)
    worker(p, "w", seqs=8, prefill_tokens=1_000, tier_prefixes=list(CHAIN), **FAST)
    p.queued(job("computed", prompt=2_100), NOW)
    p.queued(job("loaded", tenant="u", prompt=2_100, prefix=CHAIN), NOW)
    assert placed(p.decide(NOW)) == {"loaded": "w"}


def test_a_worker_that_is_kept_for_a_long_prompt_loads_it_too() -> None:
    p = fair(prefill_tokens_per_worker=600, max_overtakes=0)
    worker(p, "w", seqs=8, prefill_tokens=300, tier_prefixes=list(CHAIN), **FAST)
    p.queued(job("r", prompt=2_100, prefix=CHAIN), NOW)
    assert p.decide(NOW) == []
    worker(p, "w", seqs=8, prefill_tokens=100, now=NOW + 100, **FAST)
    effect = dispatch_of(p, NOW + 100)
    assert (effect.held_tokens, effect.tier_tokens) == (0, 8 * CHUNK_TOKENS)


chunks = st.integers(0, len(CHAIN))
rates = st.one_of(
    st.just({}),
    st.builds(
        lambda load, prefill: {"load_us_per_token": load, "prefill_us_per_token": prefill},
        st.floats(0.01, 500),
        st.floats(0.01, 500),
    ),
)


@given(
    held=chunks,
    in_tier=chunks,
    rate=rates,
    rest=st.integers(0, CHUNK_TOKENS - 1),
    load=st.integers(0, 7),
    holder_first=st.booleans(),
)
@example(
    held=8,
    in_tier=8,
    rate={"load_us_per_token": 0.01, "prefill_us_per_token": 500.0},
    rest=0,
    load=0,
    holder_first=False,
)
@settings(max_examples=200, deadline=None)
def test_at_equal_load_holding_the_prefix_beats_loading_it_and_loading_beats_computing(
    held: int,
    in_tier: int,
    rate: dict[str, float],
    rest: int,
    load: int,
    holder_first: bool,
) -> None:
    """Three workers of equal load: one holds some of the prefix, two do not, and one of those has no tier."""
    names = ["holder", "loader", "other"] if holder_first else ["other", "loader", "holder"]
    p = fair()
    for slot, name in enumerate(names):
        worker(
            p,
            name,
            slot,
            seqs=8,
            running=load,
            prefixes=list(CHAIN[:held]) if name == "holder" else [],
            tier_prefixes=list(CHAIN[:in_tier]),
            **(rate if name != "other" else {}),
        )
    prompt = len(CHAIN) * CHUNK_TOKENS + rest
    p.queued(job("r", prompt=prompt, prefix=CHAIN), NOW)
    ratio = min(1.0, rate["load_us_per_token"] / rate["prefill_us_per_token"]) if rate else 1.0
    effect = dispatch_of(p)
    if held:
        assert effect.worker_id == "holder"
        assert effect.held_tokens == held * CHUNK_TOKENS
    elif in_tier and ratio < 0.99:
        # The holder holds nothing, so it is as good a loader.
        assert effect.worker_id in ("holder", "loader")
        assert effect.tier_tokens == in_tier * CHUNK_TOKENS
    elif ratio == 1.0:
        assert effect.worker_id == names[0], "no preference, so the first slot"
        assert effect.tier_tokens == 0
