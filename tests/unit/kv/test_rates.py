"""Loading or computing: by what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.rates import BreakEven, Rate

work = st.tuples(st.floats(1e-6, 1e3), st.integers(1, 10**9))


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_what_was_never_measured_is_not_known() -> None:
    assert Rate().per_unit is None


@settings(deadline=None)
@given(work)
def test_the_first_measurement_is_the_rate(piece: tuple[float, int]) -> None:
    rate = Rate()
    rate.measured(*piece)
    assert rate.per_unit == pytest.approx(piece[0] / piece[1])


@settings(deadline=None)
@given(st.lists(work, min_size=1, max_size=20))
def test_a_rate_is_never_beyond_what_was_measured(pieces: list[tuple[float, int]]) -> None:
    rate = Rate()
    for piece in pieces:
        rate.measured(*piece)
    measured = [seconds / units for seconds, units in pieces]
    assert rate.per_unit is not None
    assert min(measured) * (1 - 1e-9) <= rate.per_unit <= max(measured) * (1 + 1e-9)


def test_a_rate_follows_a_change_within_some_measurements() -> None:
    rate = Rate()
    for seconds in [1.0] * 10 + [3.0] * 10:
        rate.measured(seconds, 1)
    assert rate.per_unit == pytest.approx(3.0, rel=0.1)


def test_large_pieces_count_for_more() -> None:
    small, large = Rate(), Rate()
    for rate, units in ((small, 1), (large, 100)):
        rate.measured(10.0, 10)
        rate.measured(3.0 * units, units)
    assert small.per_unit is not None
    assert large.per_unit is not None
    assert 1.0 < small.per_unit < large.per_unit < 3.0


def test_as_long_as_one_rate_is_unknown_loading_is_tried() -> None:
    even = BreakEven(Clock())
    assert even.worth_loading(1, 10**12, 10**12)
    even.loaded(1_000.0, 1)
    assert even.worth_loading(1, 10**12, 0)
    even.prefill.measured(1e-9, 1)
    assert not even.worth_loading(1, 10**12, 0)


@settings(deadline=None)
@given(work, work, st.integers(1, 10**5), st.integers(1, 10**9), st.integers(0, 10**9))
def test_what_is_faster_is_done(
    load: tuple[float, int], prefill: tuple[float, int], tokens: int, size: int, queued: int
) -> None:
    even = BreakEven(Clock())
    even.loaded(*load)
    even.prefill.measured(*prefill)
    loading = load[0] / load[1] * (size + queued)
    computing = prefill[0] / prefill[1] * tokens
    if loading != pytest.approx(computing):
        assert even.worth_loading(tokens, size, queued) == (loading < computing)


def test_a_stale_rate_is_tried_again_by_one_load_at_a_time() -> None:
    clock = Clock()
    even = BreakEven(clock)
    even.loaded(10.0, 1)
    even.prefill.measured(1.0, 1)
    clock.now += 10.0
    assert not even.worth_loading(1, 1, 0)
    clock.now += 0.1
    assert even.worth_loading(1, 1, 0)
    assert not even.worth_loading(1, 1, 0)
    clock.now += 10.1
    assert even.worth_loading(1, 1, 0)


def test_a_trial_that_was_fast_makes_loading_worth_it_again() -> None:
    clock = Clock()
    even = BreakEven(clock)
    even.loaded(10.0, 1)
    even.prefill.measured(1.0, 1)
    clock.now += 11.0
    even.loaded(0.01, 1_000)
    assert even.worth_loading(1, 1, 0)


def test_a_tier_that_was_just_loaded_from_is_not_tried_anew() -> None:
    """Also on a machine that has only just started, whose monotonic clock is near 0."""
    clock = Clock()
    clock.now = 0.0
    even = BreakEven(clock)
    even.loaded(10.0, 1)
    even.prefill.measured(1.0, 1)
    assert not even.worth_loading(1, 1, 0)
