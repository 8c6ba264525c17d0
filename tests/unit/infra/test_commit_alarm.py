"""When commits that fail stop the taking of records: G10."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.commit_alarm import CommitAlarm
from infra.telemetry import COMMITS_FAILING

PATIENCE = 5.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def shown() -> float:
    [metric] = COMMITS_FAILING.collect()
    return float(metric.samples[0].value)


def test_commits_that_fail_for_long_stop_the_intake_until_one_succeeds_G10(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    alarm = CommitAlarm(PATIENCE, clock)
    alarm.tried()
    clock.now += PATIENCE - 0.1
    alarm.tried()
    assert not alarm.is_on()
    clock.now += 0.1
    assert alarm.is_on()
    assert shown() == PATIENCE
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    clock.now += 60
    assert alarm.is_on()
    assert len(caplog.records) == 1, "said once"
    alarm.settled()
    assert not alarm.is_on()
    assert shown() == 0
    assert [r.levelno for r in caplog.records] == [logging.ERROR, logging.WARNING]


def test_a_commit_that_is_never_answered_counts_too_G10() -> None:
    clock = Clock()
    alarm = CommitAlarm(PATIENCE, clock)
    alarm.tried()
    clock.now += 2 * PATIENCE
    assert alarm.is_on()


async def test_who_waits_for_its_end_goes_on_when_a_commit_succeeds() -> None:
    clock = Clock()
    alarm = CommitAlarm(PATIENCE, clock)
    await alarm.until_off()
    alarm.tried()
    await alarm.until_off()
    clock.now += PATIENCE
    waiting = asyncio.ensure_future(alarm.until_off())
    await asyncio.sleep(0)
    assert not waiting.done()
    alarm.settled()
    await waiting


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 20)), max_size=30))
def test_it_is_on_exactly_when_nothing_was_settled_since_the_first_try_long_ago(
    events: list[tuple[bool, float]],
) -> None:
    clock = Clock()
    alarm = CommitAlarm(PATIENCE, clock)
    since: float | None = None
    for settles, pause in events:
        if settles:
            alarm.settled()
            since = None
        else:
            alarm.tried()
            since = clock.now if since is None else since
        clock.now += pause
        assert alarm.is_on() is (since is not None and clock.now - since >= PATIENCE)
