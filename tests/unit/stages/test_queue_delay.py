from hypothesis import given
from hypothesis import strategies as st

from stages.queue_delay import QueueDelays


def test_a_standstill_shows_although_nothing_is_dispatched() -> None:
    delays = QueueDelays()
    delays.joined("r", "default", "free", 1_000)
    assert delays.measure(31_000, 10, 0.9) == {"default": {"free": 30.0}}


def test_one_odd_request_among_many_is_no_queue_delay() -> None:
    delays = QueueDelays()
    delays.joined("odd", "default", "paid", 0)
    for n in range(20):
        delays.joined(f"r{n}", "default", "paid", 99_000)
        delays.dispatched(f"r{n}", 99_100)
    assert delays.measure(100_000, 10, 0.9) == {"default": {"paid": 0.1}}


def test_pools_and_tiers_are_apart_and_what_left_or_runs_elsewhere_does_not_count() -> None:
    delays = QueueDelays()
    delays.joined("a", "small", "free", 0)
    delays.joined("b", "large", "paid", 2_000)
    delays.joined("cancelled", "large", "free", 0)
    delays.joined("adopted", "large", "batch", 0)
    delays.left("cancelled")
    found = delays.measure(4_000, 10, 0.9, is_waiting=lambda request_id: request_id != "adopted")
    assert found == {"small": {"free": 4.0}, "large": {"paid": 2.0}}


def test_what_was_dispatched_before_the_window_is_forgotten() -> None:
    delays = QueueDelays()
    delays.joined("r", "default", "free", 0)
    delays.dispatched("r", 5_000)
    delays.dispatched("r", 6_000)  # again, after its worker was lost: no queue delay any more
    assert delays.measure(14_999, 10, 0.9) == {"default": {"free": 5.0}}
    assert delays.measure(15_000, 10, 0.9) == {}


@given(
    st.lists(st.integers(0, 60_000), min_size=1, max_size=50),
    st.floats(0.01, 1),
    st.lists(st.booleans(), min_size=50, max_size=50),
)
def test_the_delay_is_one_that_a_request_had_and_at_least_its_share_had_no_longer_one(
    waits: list[int], percentile: float, gone: list[bool]
) -> None:
    delays = QueueDelays()
    now_ms = 100_000
    for n, wait in enumerate(waits):
        delays.joined(f"r{n}", "p", "t", now_ms - wait)
        if gone[n]:
            delays.dispatched(f"r{n}", now_ms)
    found = delays.measure(now_ms, 10, percentile)["p"]["t"]
    assert found in [w / 1000 for w in waits]
    assert sum(w / 1000 <= found for w in waits) >= percentile * len(waits)
