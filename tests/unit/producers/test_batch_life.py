"""States of a batch and what leads from one to another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.batch import (
    BatchRecord,
    BatchStatus,
    BatchUsage,
    Counts,
    LineFault,
)
from producers.batch import life
from producers.batch.shapes import batch_object
from tests.batches import begun, make_batch

FAULT = LineFault(code="invalid_json_line", message="No.", line=3)


def test_a_batch_goes_through_its_states_with_their_times() -> None:
    batch = make_batch()
    batch = life.validated(batch, 7, [], 2_000_000)
    batch = life.progressed(batch, Counts(total=7, completed=6, failed=1), BatchUsage())
    batch = life.finalizing(batch, BatchStatus.COMPLETED, 3_000_000)
    batch = life.ended(life.decided(batch, {}, batch.counts, BatchUsage()), 4_000_000)
    shown = batch_object(batch)
    assert shown["status"] == "completed"
    times = [shown[f"{s}_at"] for s in ("created", "in_progress", "finalizing", "completed")]  # type: ignore[literal-required]
    assert times == [1000, 2000, 3000, 4000]
    assert shown["request_counts"] == {"total": 7, "completed": 6, "failed": 1}
    others = ("failed_at", "expired_at", "cancelling_at", "cancelled_at")
    assert [shown[name] for name in others] == [None] * 4  # type: ignore[literal-required]


def test_faults_of_the_input_fail_the_batch_with_their_lines() -> None:
    shown = batch_object(life.validated(make_batch(), 7, [FAULT], 2_000_000))
    assert (shown["status"], shown["failed_at"]) == ("failed", 2000)
    assert shown["errors"] is not None
    assert shown["errors"]["data"][0]["line"] == 3


def test_cancelling_while_it_is_validated_lets_no_line_begin() -> None:
    batch = life.cancelled(make_batch(), 1_500_000)
    batch = life.validated(batch, 7, [], 2_000_000)
    assert batch.status is BatchStatus.CANCELLING
    assert life.ending_of(batch, 2_000_000) is BatchStatus.CANCELLED
    batch = life.ended(life.finalizing(batch, BatchStatus.COMPLETED, 3_000_000), 4_000_000)
    assert batch.status is BatchStatus.CANCELLED
    assert batch_object(batch)["cancelling_at"] == 1500


def test_a_batch_ends_as_expired_when_its_window_is_over_K10() -> None:
    batch = begun(7, window_ms=5_000)
    assert life.ending_of(batch, 1_004_999) is None
    assert life.ending_of(batch, 1_005_000) is BatchStatus.EXPIRED
    batch = life.finalizing(batch, BatchStatus.EXPIRED, 1_005_000)
    assert life.ended(batch, 1_006_000).status is BatchStatus.EXPIRED


@pytest.mark.parametrize(
    "status", [BatchStatus.FINALIZING, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.FAILED]
)
def test_it_can_be_too_late_to_cancel(status: BatchStatus) -> None:
    batch = make_batch(status=status)
    assert life.cancelled(batch, 2_000_000) == batch


STEPS = {
    "cancelled": lambda b: life.cancelled(b, 2_000_000),
    "taken": lambda b: life.taken(b, 0),
    "ended": lambda b: life.ended(b, 2_000_000),
}


@given(st.sampled_from([BatchStatus.COMPLETED, BatchStatus.EXPIRED]), st.booleans())
def test_a_cancellation_before_the_files_are_made_has_the_last_word(
    ending: BatchStatus, cancelled: bool
) -> None:
    batch = begun(3)
    if cancelled:
        batch = life.cancelled(batch, 2_000_000)
    batch = life.ended(life.finalizing(batch, ending, 2_000_000), 2_000_000)
    assert batch.status is (BatchStatus.CANCELLED if cancelled else ending)


@given(st.lists(st.sampled_from(["cancelled", "taken", "ended"]), max_size=5))
def test_an_end_is_one(after: list[str]) -> None:
    batch: BatchRecord = life.ended(life.finalizing(begun(3), BatchStatus.COMPLETED, 1), 1)
    for step in after:
        batch = STEPS[step](batch)
    assert batch.status is BatchStatus.COMPLETED
    assert batch.times == {BatchStatus.FINALIZING: 1, BatchStatus.COMPLETED: 1}
