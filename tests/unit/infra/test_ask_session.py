from typing import Any

from infra.cli.ask_session import STOP_CLOSE_CODES, AskSession, Ended, Progress, ReplyText

_ID = "chatcmpl-1"


def _accepted() -> AskSession:
    session = AskSession("why?", "default", 7)
    session.opening("key", now=10.0)
    assert session.receive({"type": "chat.accepted", "ref": "ask", "request_id": _ID}, 10.0)
    return session


def _text(offset: str, text: str) -> dict[str, Any]:
    return {"type": "stream.text", "request_id": _ID, "offset": offset, "index": 0, "text": text}


def test_the_first_connection_authenticates_and_asks() -> None:
    auth, create = AskSession("why?", "m", 7).opening("key", now=0.0)
    assert auth == {"type": "auth", "api_key": "key"}
    assert create["type"] == "chat.create"
    assert create["body"] == {
        "model": "m",
        "messages": [{"role": "user", "content": "why?"}],
        "max_tokens": 7,
    }


def test_a_later_connection_reads_on_after_the_last_offset_and_never_asks_again() -> None:
    session = _accepted()
    assert session.receive(_text("1-1", "a"), 10.1) == ReplyText("a")
    _, subscribe = session.opening("key", now=11.0)
    assert subscribe == {"type": "stream.subscribe", "request_id": _ID, "after": "1-1"}


def test_what_a_new_connection_repeats_is_shown_once_E13() -> None:
    session = _accepted()
    assert session.receive(_text("1-9", "a"), 10.1) == ReplyText("a")
    session.opening("key", now=11.0)
    assert session.receive(_text("1-9", "a"), 11.1) is None
    assert session.receive(_text("1-8", "x"), 11.1) is None
    assert session.receive(_text("1-10", "b"), 11.1) == ReplyText("b")
    assert session.receive(_text("2-11", "c"), 11.1) == ReplyText("c")
    assert session.opening("key", now=12.0)[1]["after"] == "2-11"


def test_a_connection_lost_right_after_acceptance_reads_from_the_start() -> None:
    _, subscribe = _accepted().opening("key", now=11.0)
    assert subscribe["after"] is None


def test_states_are_progress_and_frames_of_others_are_nothing() -> None:
    session = _accepted()
    status = {"type": "stream.status", "request_id": _ID, "offset": "0-2", "status": "moderated"}
    assert session.receive(status, 10.0) == Progress("moderated")
    assert session.receive(_text("1-9", "x") | {"request_id": "other"}, 10.0) is None
    assert session.receive({"type": "pong"}, 10.0) is None


def test_figures_count_from_the_question_to_the_first_text_and_per_token_after_it() -> None:
    session = _accepted()
    session.receive(_text("1-1", "a"), 10.25)
    session.opening("key", now=10.5)
    session.receive(_text("1-5", "b"), 12.25)
    end = {"type": "stream.end", "request_id": _ID, "offset": "M", "status": "completed", "error": None}
    ended = session.receive(end | {"usage": {"completion_tokens": 5}}, 12.3)
    assert ended == Ended("completed", None)
    assert session.figures() == "first token after 250 ms, 5 tokens, 2.0 tokens/s"


def test_a_refusal_ends_with_its_message() -> None:
    session = AskSession("why?", "m", None)
    session.opening("key", now=0.0)
    error = {"type": "error", "ref": "ask", "error": {"message": "no such model", "code": "x"}}
    assert session.receive(error, 0.1) == Ended("failed", "no such model")
    assert session.figures() == ""


def test_an_unaccepted_question_cannot_be_cancelled() -> None:
    assert AskSession("why?", "m", None).cancel() is None
    assert _accepted().cancel() == {"type": "chat.cancel", "request_id": _ID}


def test_codes_that_mean_reconnect_do_not_stop_it() -> None:
    assert {1012, 1013}.isdisjoint(STOP_CLOSE_CODES)
    assert 4401 in STOP_CLOSE_CODES
