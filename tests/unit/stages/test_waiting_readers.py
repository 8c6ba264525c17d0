"""Turns through the waiting requests: each is looked at, none is looked at for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.leaving import TURN_LEAST, TURN_MOST, WaitingReaders


@given(st.integers(0, 3_000))
def test_four_turns_see_every_request_once_at_least(count: int) -> None:
    readers, ids = WaitingReaders(), [f"r{n:05}" for n in range(count)]
    turns = [readers.turn(ids) for _ in range(4)]
    assert {i for turn in turns for i in turn} == set(ids)
    assert all(len(turn) <= max(TURN_LEAST, TURN_MOST) for turn in turns)
    assert all(len(set(turn)) == len(turn) for turn in turns)


def test_requests_that_go_meanwhile_do_not_stop_the_round() -> None:
    readers = WaitingReaders()
    first = readers.turn([f"r{n:03}" for n in range(200)])
    rest = [f"r{n:03}" for n in range(200) if f"r{n:03}" not in first]
    assert readers.turn(rest) == rest[:TURN_LEAST]
