from hypothesis import given
from hypothesis import strategies as st

from contracts.degraded import OverloadStep
from contracts.tiers import QueueClass
from infra.settings import OverloadSettings, TierSettings
from stages.overload import OverloadLadder, StepChange

TIERS = {
    "paid": TierSettings(queue_class=QueueClass.INTERACTIVE, ttft_target_seconds=2.0),
    "free": TierSettings(queue_class=QueueClass.STANDARD, ttft_target_seconds=10.0),
    "batch": TierSettings(queue_class=QueueClass.BATCH, ttft_target_seconds=1.0),
}
SETTINGS = OverloadSettings(
    raise_ratio=1.0, raise_seconds=5, lower_ratio=0.5, lower_seconds=15, wait_factor=3.0
)


def drive(
    ladder: OverloadLadder, delays: dict[str, float], start: int, seconds: int
) -> list[StepChange]:
    """Observe the same delays once a second."""
    seen = [ladder.observe(delays, float(start + second)) for second in range(seconds)]
    return [change for change in seen if change is not None]


def test_paid_overload_degrades_batch_then_free_then_paid_in_the_written_order() -> None:
    changes = drive(OverloadLadder(SETTINGS, TIERS), {"paid": 9.0, "free": 100.0}, 0, 60)
    assert [c.after for c in changes] == [
        OverloadStep.BATCH_PAUSED,
        OverloadStep.STANDARD_WAITS,
        OverloadStep.STANDARD_SMALLER_MODEL,
        OverloadStep.STANDARD_SHORTER,
        OverloadStep.STANDARD_REFUSED,
        OverloadStep.INTERACTIVE_REFUSED,
    ]
    degraded = [c.after.degrades for c in changes]
    assert degraded == sorted(degraded, key=lambda c: c.rank, reverse=True)


def test_a_flood_of_free_requests_never_costs_paid_users_anything() -> None:
    ladder = OverloadLadder(SETTINGS, TIERS)
    drive(ladder, {"paid": 0.1, "free": 1_000.0}, 0, 600)
    assert ladder.level.step is OverloadStep.STANDARD_REFUSED


def test_waiting_batch_requests_are_no_overload() -> None:
    ladder = OverloadLadder(SETTINGS, TIERS)
    assert drive(ladder, {"batch": 50_000.0, "gone-tier": 50_000.0}, 0, 600) == []


def test_free_users_that_wait_longer_are_judged_by_their_longer_target() -> None:
    ladder = OverloadLadder(SETTINGS, TIERS)
    drive(ladder, {"free": 25.0}, 0, 600)
    assert ladder.level.step is OverloadStep.STANDARD_WAITS
    drive(ladder, {"free": 31.0}, 600, 10)
    assert ladder.level.step is OverloadStep.STANDARD_SMALLER_MODEL


def test_the_reason_names_tier_and_delay_and_stays_until_service_is_normal() -> None:
    ladder = OverloadLadder(SETTINGS, TIERS)
    (raised,) = drive(ladder, {"paid": 3.0}, 0, 8)
    assert raised.reason == "tier paid waits 3.0 s, 1.5 times its target"
    drive(ladder, {"paid": 3.0}, 8, 6)
    why = ladder.level.reason
    (lowered,) = drive(ladder, {"paid": 0.5}, 14, 16)
    assert lowered.after is OverloadStep.BATCH_PAUSED
    assert lowered.reason == "no tier waits more than 0.2 times its target"
    assert ladder.level.reason == why
    drive(ladder, {}, 30, 20)
    assert ladder.level.reason == ""


def test_a_pause_of_the_observer_proves_nothing_about_the_time_in_between() -> None:
    ladder = OverloadLadder(SETTINGS, TIERS)
    assert ladder.observe({"paid": 9.0}, 0.0) is None
    assert ladder.observe({"paid": 9.0}, 60.0) is None
    assert ladder.observe({"paid": 9.0}, 65.0) is not None


def test_switching_the_ladder_off_gives_normal_service_at_once() -> None:
    ladder = OverloadLadder(SETTINGS, TIERS)
    drive(ladder, {"paid": 9.0}, 0, 60)
    ladder.reconfigure(OverloadSettings(enabled=False), TIERS)
    change = ladder.observe({"paid": 9.0}, 61.0)
    assert change is not None
    assert change.after is OverloadStep.NORMAL
    assert ladder.observe({"paid": 9.0}, 62.0) is None


delay = st.floats(0, 1_000, allow_nan=False)
delays = st.dictionaries(st.sampled_from([*TIERS, "unknown"]), delay)
observations = st.lists(st.tuples(delays, st.floats(0, 20)), max_size=200)


@given(observations)
def test_no_step_is_skipped_and_each_lasts_its_time(seen: list[tuple[dict[str, float], float]]) -> None:
    ladder = OverloadLadder(SETTINGS, TIERS)
    now = changed_at = 0.0
    before = ladder.level.step
    for measured, pause in seen:
        now += pause
        change = ladder.observe(measured, now)
        after = ladder.level.step
        if change is None:
            assert after is before
            continue
        assert (change.before, change.after) == (before, after)
        assert abs(after.rank - before.rank) == 1
        least = SETTINGS.raise_seconds if after.rank > before.rank else SETTINGS.lower_seconds
        assert now - changed_at >= least
        before, changed_at = after, now


@given(observations, st.lists(st.floats(0.51, 0.99), min_size=300, max_size=300), st.integers(0, 60))
def test_noise_between_the_thresholds_moves_nothing(
    history: list[tuple[dict[str, float], float]], noise: list[float], load_seconds: int
) -> None:
    """From whatever step: a paid delay within the band keeps it there for good."""
    ladder = OverloadLadder(SETTINGS, TIERS)
    now = 0.0
    for measured, pause in history:
        now += pause
        ladder.observe(measured, now)
    for second in range(load_seconds):
        ladder.observe({"paid": 9.0}, now + second)
    now += load_seconds
    step = ladder.level.step
    target = TIERS["paid"].ttft_target_seconds
    for second, ratio in enumerate(noise):
        assert ladder.observe({"paid": ratio * target}, now + second) is None
    assert ladder.level.step is step


@given(observations)
def test_it_comes_all_the_way_down_when_the_load_is_gone(
    history: list[tuple[dict[str, float], float]],
) -> None:
    ladder = OverloadLadder(SETTINGS, TIERS)
    now = 0.0
    for measured, pause in history:
        now += pause
        ladder.observe(measured, now)
    down = [ladder.observe({}, now + second) for second in range(1, 120)]
    assert all(c.after.rank < c.before.rank for c in down if c is not None)
    assert ladder.level.step is OverloadStep.NORMAL
