"""When readers count as gone: D1, D4, E8."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from contracts.absence import NOBODY, SETTLE_MS, AbsenceTracker, Sighting

NOW = 1_000_000


def due(tracker: AbsenceTracker, sighting: Sighting, now_ms: int, grace_ms: int = 0) -> bool:
    return tracker.observe("r", sighting, accepted_ms=NOW, grace_ms=grace_ms, now_ms=now_ms)


def test_d1_an_announced_departure_counts_at_once_with_grace_zero() -> None:
    assert due(AbsenceTracker(), Sighting(0, NOW + 50), NOW + 50)


def test_d1_an_announced_departure_waits_for_the_grace_time() -> None:
    tracker, left = AbsenceTracker(), Sighting(0, NOW + 50)
    assert not due(tracker, left, NOW + 1_049, grace_ms=1_000)
    assert due(tracker, left, NOW + 1_050, grace_ms=1_000)


def test_e8_another_reader_elsewhere_keeps_it_alive() -> None:
    assert not due(AbsenceTracker(), Sighting(NOW + 4_000, NOW + 50), NOW + 100)


def test_a_reader_that_came_back_and_died_is_not_taken_for_the_one_that_left() -> None:
    tracker, sighting = AbsenceTracker(), Sighting(vouched_until_ms=NOW + 4_000, left_ms=NOW + 10)
    assert not due(tracker, sighting, NOW + 4_001)
    assert due(tracker, sighting, NOW + 4_001 + SETTLE_MS)


def test_the_time_before_the_first_reader_counts_from_acceptance() -> None:
    tracker = AbsenceTracker()
    assert not due(tracker, NOBODY, NOW + 100)
    assert not due(tracker, NOBODY, NOW + SETTLE_MS)
    assert due(tracker, NOBODY, NOW + SETTLE_MS + 100)
    tracker = AbsenceTracker()
    for at in range(0, 10_000, 500):
        assert not due(tracker, NOBODY, NOW + at, grace_ms=10_000)
    assert due(tracker, NOBODY, NOW + 10_000, grace_ms=10_000)


def test_a_silence_is_judged_only_if_it_was_watched_without_a_break() -> None:
    tracker, lapsed = AbsenceTracker(), Sighting(NOW + 100)
    assert not due(tracker, lapsed, NOW + 200)
    # We, or the store, were away: the hub may not have had the time to speak up.
    assert not due(tracker, lapsed, NOW + 60_000)
    assert due(tracker, lapsed, NOW + 60_000 + SETTLE_MS)


def test_forgetting_leaves_nothing_behind() -> None:
    tracker = AbsenceTracker()
    due(tracker, NOBODY, NOW)
    assert tracker.watched == 1
    tracker.forget("r")
    assert tracker.watched == 0


@given(
    steps=st.lists(st.tuples(st.integers(1, 5_000), st.booleans()), max_size=60),
    grace_ms=st.integers(0, 20_000),
)
def test_never_due_before_the_grace_time_has_passed_without_any_reader(
    steps: list[tuple[int, bool]], grace_ms: int
) -> None:
    tracker, now, until, last_present = AbsenceTracker(), NOW, 0, NOW
    for step, vouches in steps:
        now += step
        if vouches:
            until = now + 4_000
        last_present = max(last_present, min(now, until))
        if due(tracker, Sighting(until), now, grace_ms):
            assert now - last_present >= grace_ms
            assert until <= now


@given(grace_ms=st.integers(0, 20_000), every=st.integers(50, SETTLE_MS))
def test_an_absence_watched_steadily_always_comes_to_an_end(grace_ms: int, every: int) -> None:
    tracker, now = AbsenceTracker(), NOW
    while not due(tracker, NOBODY, now, grace_ms):
        now += every
        assert now <= NOW + max(grace_ms, SETTLE_MS) + every
