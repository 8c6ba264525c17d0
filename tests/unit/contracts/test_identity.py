import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import ApiError, ErrorCode
from contracts.identity import conversation_key, is_request_id, is_user_name, make_request_id

names = st.text(max_size=20)


@given(names, names, names, names)
def test_n4_no_two_conversations_share_a_key(t1: str, c1: str, t2: str, c2: str) -> None:
    same = conversation_key(t1, c1) == conversation_key(t2, c2)
    assert same == ((t1, c1) == (t2, c2))


def test_n4_the_reported_collision() -> None:
    assert conversation_key("a:b", "c") != conversation_key("a", "b:c")


@pytest.mark.parametrize("name", ["", "a b", "a\n", "{x}", "a:b", "é", "а", "x" * 65, None, 7])
def test_n4_what_may_not_name_a_conversation(name: object) -> None:
    assert not is_user_name(name)


def test_request_ids_sort_by_time_and_are_recognised() -> None:
    early, late = make_request_id(1_000, b"\xff" * 10), make_request_id(1_001, b"\x00" * 10)
    assert early < late
    assert is_request_id(early)
    assert not is_request_id(early + "\n")
    assert not is_request_id(early.upper())


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_code_has_a_status_and_a_type_of_the_api(code: ErrorCode) -> None:
    error = ApiError(code, "words", param="p")
    assert 400 <= error.status <= 599
    assert error.body.status == error.status
    assert error.body.type
    assert error.body.code == code.value
