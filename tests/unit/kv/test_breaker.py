"""A store in trouble is left alone, and tried by one caller at a time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kv.breaker import Breaker


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    breaker.failed()
    breaker.failed()
    return breaker


def test_one_failure_changes_nothing() -> None:
    breaker = Breaker(Clock())
    assert breaker.allows()
    breaker.failed()
    assert not breaker.open
    assert breaker.allows()


def test_failures_count_only_in_a_row() -> None:
    breaker = Breaker(Clock())
    for _ in range(5):
        breaker.failed()
        breaker.succeeded()
    assert not breaker.open


def test_two_failures_open_it_for_half_a_second() -> None:
    clock = Clock()
    breaker = opened(clock)
    assert breaker.open
    clock.now += 0.49
    assert not breaker.allows()
    clock.now += 0.02
    assert breaker.allows()


def test_one_caller_tries_and_the_others_wait_for_what_becomes_of_it() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 0.6
    assert [breaker.allows() for _ in range(4)] == [True, False, False, False]
    breaker.succeeded()
    assert not breaker.open
    assert all(breaker.allows() for _ in range(4))


def test_a_caller_that_tries_and_is_never_heard_of_again_does_not_keep_it_shut() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 0.6
    assert breaker.allows()
    clock.now += 1.1
    assert [breaker.allows() for _ in range(2)] == [True, False]


def pauses(clock: Clock, breaker: Breaker, count: int) -> list[float]:
    """How long nobody may try, failure by failure."""
    found = []
    for _ in range(count):
        start = clock.now
        while not breaker.allows():
            clock.now += 0.25
        found.append(clock.now - start)
        breaker.failed()
    return found


def test_pauses_double_up_to_half_a_minute_and_begin_anew_after_a_success() -> None:
    clock = Clock()
    breaker = opened(clock)
    assert pauses(clock, breaker, 9) == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    breaker.succeeded()
    breaker.failed()
    breaker.failed()
    assert pauses(clock, breaker, 2) == [0.5, 1]


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from(["ask", "failed", "succeeded"]), st.floats(0.01, 40)), max_size=60
    )
)
def test_whatever_happens_an_open_one_lets_one_through_in_each_pause(events: list[str | float]) -> None:
    clock = Clock()
    breaker = Breaker(clock)
    let_through: float | None = None
    for event in events:
        if event == "ask":
            was_open = breaker.open
            allowed = breaker.allows()
            assert allowed or was_open
            if allowed and was_open:
                assert let_through is None or clock.now - let_through >= 0.5
                let_through = clock.now
        elif event == "failed":
            breaker.failed()
        elif event == "succeeded":
            breaker.succeeded()
            let_through = None
            assert breaker.allows()
        else:
            assert isinstance(event, float)
            clock.now += event
    clock.now += 30.0
    assert breaker.allows()
