from hypothesis import given
from hypothesis import strategies as st

from infra.role import EXIT_CONFIGURATION
from infra.stack.policy import (
    DRAIN_PHASES,
    FIRST_WAIT_SECONDS,
    LONGEST_WAIT_SECONDS,
    SETTLED_SECONDS,
    STACK_DRAIN_SECONDS,
    GiveUp,
    Restart,
    RoleHealth,
    after_exit,
    drain_phases,
    pipeline_gap,
)
from infra.stack.units import ROLE_MODULES


def test_a_role_that_ran_well_restarts_at_once() -> None:
    assert after_exit(-9, SETTLED_SECONDS, streak=7) == Restart(FIRST_WAIT_SECONDS, 1)


def test_a_process_that_was_asked_to_stop_restarts_at_once_and_counts_for_no_death() -> None:
    assert after_exit(0, 1.0, streak=7) == Restart(0.0, 0)
    assert after_exit(0, 0.1, streak=2) == Restart(0.8, 3), "nobody was that quick: it does not start"


def test_quick_deaths_back_off_up_to_a_bound() -> None:
    waits, streak = [], 0
    for _ in range(12):
        decision = after_exit(1, 0.1, streak)
        assert isinstance(decision, Restart)
        waits.append(decision.after_seconds)
        streak = decision.streak
    assert waits[:4] == [0.2, 0.4, 0.8, 1.6]
    assert waits[-1] == LONGEST_WAIT_SECONDS
    assert waits == sorted(waits)


def test_a_configuration_error_is_never_retried() -> None:
    assert after_exit(EXIT_CONFIGURATION, 100.0, 0) == GiveUp()


@given(st.integers(-64, 255), st.floats(0, 1e6), st.integers(0, 10_000))
def test_every_restart_waits_within_the_bounds(code: int, ran: float, streak: int) -> None:
    decision = after_exit(code, ran, streak)
    if isinstance(decision, Restart):
        drained = code == 0 and ran >= FIRST_WAIT_SECONDS
        assert decision.after_seconds <= LONGEST_WAIT_SECONDS
        assert drained or decision.after_seconds >= FIRST_WAIT_SECONDS
        assert drained or decision.streak >= 1


def test_what_others_stand_on_drains_last() -> None:
    order = [names for names, _ in drain_phases(["redis", "broker", "worker", *ROLE_MODULES])]
    assert order == [
        ["gateway", "edge", "batch-runner"],
        ["moderation", "scheduler", "history"],
        ["worker"],
        ["redis"],
        ["broker"],
    ]


def test_phases_without_a_process_take_no_time() -> None:
    assert [names for names, _ in drain_phases(["edge", "worker"])] == [["edge"], ["worker"]]


def test_every_role_has_a_place_in_the_drain_and_all_of_it_fits() -> None:
    placed = {name for names, _ in DRAIN_PHASES for name in names}
    assert placed == {*ROLE_MODULES, "redis", "kv-redis", "broker"}
    assert sum(grace for _, grace in DRAIN_PHASES) < 15
    assert all(grace > STACK_DRAIN_SECONDS for names, grace in DRAIN_PHASES if names & set(ROLE_MODULES))


def _roles(**ready: bool) -> list[RoleHealth]:
    return [RoleHealth(name, 0, up, None if up else "loading") for name, up in ready.items()]


def test_the_pipeline_is_whole_with_one_worker_and_without_history() -> None:
    roles = _roles(moderation=True, scheduler=True, edge=True, worker=True, history=False)
    assert pipeline_gap([*roles, RoleHealth("worker", 1, False, "loading")]) is None


def test_the_pipeline_names_what_is_missing() -> None:
    assert pipeline_gap(_roles(scheduler=True, edge=True, worker=True)) == "moderation is not ready"
    whole_but_worker = _roles(moderation=True, scheduler=True, edge=True, worker=False)
    assert pipeline_gap(whole_but_worker) == "no worker is ready (loading)"
