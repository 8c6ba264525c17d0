import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.stream_ids import (
    ACCEPTED,
    DISPATCHED,
    MAX_PART,
    MODERATED,
    SEAL,
    START,
    StreamId,
)

TOO_LONG = ["1" * 10_000, f"{MAX_PART + 1}-0", f"0-{MAX_PART + 1}", "0x1-1", "1--1", "1-+1"]

parts = st.integers(min_value=0, max_value=MAX_PART)


@given(parts, parts)
def test_an_id_survives_its_text_form(attempt: int, token: int) -> None:
    stream_id = StreamId(attempt, token)
    assert StreamId.parse(str(stream_id)) == stream_id


@pytest.mark.parametrize(
    "text",
    [
        "-1",
        "abc",
        "$",
        "0",
        "",
        "+",
        "1-",
        "-",
        "1-1-1",
        "01-1",
        "1-01",
        "1 -1",
        "1-1\n",
        "١-١",
        "1" * 10_000,
        f"{MAX_PART + 1}-0",
        f"0-{MAX_PART + 1}",
        "0x1-1",
        "1--1",
        "1-+1",
    ],
)
def test_e5_anything_that_is_no_offset_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="offset"):
        StreamId.parse(text)


def test_the_life_of_a_request_is_in_stream_order() -> None:
    first, second = StreamId(1, 0), StreamId(2, 0)
    life = [
        START,
        ACCEPTED,
        MODERATED,
        DISPATCHED,
        first,
        StreamId(1, 40),
        second,
        StreamId(2, 41),
        SEAL,
    ]
    assert life == sorted(life)
    assert [i for i in life if i.is_attempt_start] == [first, second]
    assert [i for i in life if i.is_seal] == [SEAL]


@given(st.integers(1, 1_000), st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_takeover_fences_every_id_of_the_attempt_before(attempt: int, n: int, later: int) -> None:
    assert StreamId(attempt, n + later) < StreamId(attempt + 1, 0) < StreamId(attempt + 1, n)
