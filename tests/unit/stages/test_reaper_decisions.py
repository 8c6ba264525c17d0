"""What becomes of open requests nobody has in hand: I5."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from contracts.entries import Accepted, Terminal
from contracts.stream_ids import ACCEPTED, DISPATCHED, MODERATED, SEAL, StreamId
from contracts.tiers import Status
from stages.reaper import (
    DEADLINE_MARGIN_MS,
    EXPIRED,
    ORPHANED,
    RECORD_LOST,
    End,
    Forget,
    Found,
    LookAgain,
    Verdict,
    ended_by_reaper,
    judge,
)

CREATED, WAIT, ORPHAN = 1_000_000, 60_000, 20_000
DEADLINE = CREATED + WAIT
ENTRY = Accepted(
    tenant="t", key_id="k", tier="paid", model="m", created_ms=CREATED, deadline_ms=DEADLINE
)


def verdict(
    last: StreamId | None,
    *,
    leased: bool = False,
    at: int = CREATED + ORPHAN,
    born: int = 0,
    accepted: Accepted | None = ENTRY,
) -> Verdict:
    return judge(Found(last, leased, accepted), now_ms=at, born_ms=born, orphan_ms=ORPHAN)


def test_sealed_and_lost_streams_leave_the_index() -> None:
    assert verdict(SEAL) == Forget(lost=False)
    assert verdict(None, accepted=None) == Forget(lost=True)


def test_a_started_request_with_a_lease_is_its_workers() -> None:
    assert verdict(StreamId(2, 7), leased=True) == LookAgain(CREATED + ORPHAN)


def test_i5_a_started_request_that_nobody_has_in_hand_fails_as_worker_lost() -> None:
    assert verdict(StreamId(1, 0)) == End(ORPHANED)


def test_i5_a_waiting_request_is_left_until_its_deadline_and_then_expires() -> None:
    for last in (ACCEPTED, MODERATED, DISPATCHED):
        assert isinstance(verdict(last), LookAgain)
        assert isinstance(verdict(last, at=DEADLINE + DEADLINE_MARGIN_MS - 1), LookAgain)
        assert verdict(last, at=DEADLINE + DEADLINE_MARGIN_MS) == End(EXPIRED)


def test_i5_a_request_older_than_its_topics_fails_at_once_as_retryable() -> None:
    born = CREATED + 10
    assert isinstance(verdict(MODERATED, born=born, at=born + ORPHAN - 1), LookAgain)
    assert verdict(MODERATED, born=born, at=born + ORPHAN) == End(RECORD_LOST)
    # Accepted after the topics were made: its record is in them.
    assert isinstance(verdict(MODERATED, born=CREATED, at=CREATED + ORPHAN), LookAgain)


def test_an_entry_without_a_deadline_is_not_expired_early() -> None:
    old = ENTRY.model_copy(update={"deadline_ms": 0})
    assert isinstance(verdict(ACCEPTED, accepted=old, at=CREATED + 3_000_000), LookAgain)
    assert verdict(ACCEPTED, accepted=old, at=CREATED + 3_700_000) == End(EXPIRED)


def test_only_reapers_seals_are_taken_for_theirs() -> None:
    assert all(map(ended_by_reaper, (EXPIRED, RECORD_LOST, ORPHANED)))
    assert not ended_by_reaper(None)
    assert not ended_by_reaper(Terminal(status=Status.CANCELLED))


@given(at=st.integers(0, 10**7), born=st.integers(0, 10**7))
def test_i5_looking_again_always_ends_at_the_deadline(at: int, born: int) -> None:
    """However often it is put off, the next look is never later than the deadline and one orphan time."""
    found = verdict(ACCEPTED, at=CREATED + at, born=born)
    if isinstance(found, LookAgain):
        assert found.from_ms <= CREATED + at
        assert found.from_ms + ORPHAN <= max(DEADLINE + DEADLINE_MARGIN_MS, CREATED + at + ORPHAN)
    else:
        assert isinstance(found, End)
