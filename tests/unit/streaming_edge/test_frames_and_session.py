"""What a websocket may say, and what the session makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.degraded import Degraded
from contracts.entries import Accepted, Dispatched, Moderated, Started, StreamEntry, Terminal, Text
from contracts.errors import ApiError, ErrorCode, error_body
from contracts.identity import Principal
from contracts.limits import Admission
from contracts.records import Usage
from contracts.stream_ids import ACCEPTED, DISPATCHED, MODERATED, SEAL, StreamId
from contracts.tiers import FinishReason, Status
from streaming_edge.close_codes import CloseCase
from streaming_edge.frames import ENVELOPE_BYTES, PONG, StreamFrames
from streaming_edge.session import (
    Authenticate,
    Cancel,
    CloseSocket,
    Create,
    Effect,
    Read,
    Send,
    Session,
    SessionLimits,
    Unread,
)

RID = "chatcmpl-" + "1" * 32
ME = Principal("key", "me", "paid")
LIMITS = SessionLimits(
    max_body_bytes=4096, max_streams=2, frames_per_second=10.0, auth_timeout_seconds=5.0
)


def frame(kind: str, **fields: Any) -> str:
    return json.dumps({"type": kind, **fields})


def session(principal: Principal | None = ME) -> Session:
    return Session(LIMITS, 0.0, principal)


def said(effects: list[Effect]) -> dict[str, Any]:
    (effect,) = effects
    assert isinstance(effect, Send)
    return dict(json.loads(effect.frame))


def code(effects: list[Effect]) -> str:
    body = said(effects)
    assert body["type"] == "error"
    assert set(body) == {"type", "ref", "request_id", "error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["code"])


MALFORMED: list[str | bytes] = [
    "",
    "{",
    "[]",
    "null",
    '"x"',
    "7",
    "{}",
    b'{"type":"ping"}',
    '{"type":"nope"}',
    '{"type":["ping"]}',
    '{"type":null}',
    '{"type":"auth"}',
    '{"type":"auth","api_key":7}',
    '{"type":"auth","api_key":""}',
    '{"type":"chat.create"}',
    '{"type":"chat.create","body":{"x":NaN}}',
    '{"type":"chat.create","body":{"x":"\\ud83d"}}',
    '{"type":"chat.create","ref":{},"body":{}}',
    '{"type":"stream.subscribe"}',
    '{"type":"stream.subscribe","request_id":7}',
    '{"type":"stream.subscribe","request_id":"x","after":7}',
    '{"type":"chat.cancel","request_id":"' + "x" * 129 + '"}',
    "[" * 2000,
]


@pytest.mark.parametrize("raw", MALFORMED)
def test_a_malformed_frame_is_answered_and_the_socket_lives_a11_c10(raw: str | bytes) -> None:
    one = session()
    assert code(one.receive(raw, 0.0)) == "invalid_frame"
    assert one.receive(frame("ping"), 0.0) == [Send(PONG)]


@given(st.one_of(st.text(), st.binary()))
def test_no_frame_at_all_raises(raw: str | bytes) -> None:
    session().receive(raw, 0.0)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_no_value_in_any_field_raises(value: Any) -> None:
    one = Session(
        SessionLimits(
            max_body_bytes=4096, max_streams=2, frames_per_second=1e6, auth_timeout_seconds=5.0
        ),
        0.0,
        ME,
    )
    for kind in ("auth", "chat.create", "stream.subscribe", "stream.unsubscribe", "chat.cancel", "ping"):
        fields = dict.fromkeys(("api_key", "ref", "body", "request_id", "after"), value)
        one.receive(frame(kind, **fields), 0.0)
    one.receive(json.dumps({"type": value}), 0.0)


def test_an_error_names_the_frame_it_is_about() -> None:
    body = said(session().receive(frame("stream.subscribe", ref="a", request_id=RID, after=1), 0.0))
    assert (body["ref"], body["request_id"]) == ("a", RID)


def test_a_frame_over_the_limit_is_refused_by_name_and_the_socket_lives_f4() -> None:
    one = session()
    limit = LIMITS.max_body_bytes + ENVELOPE_BYTES
    fits = frame("chat.create", body="x" * (limit - 40))
    assert isinstance(one.receive(fits, 0.0)[0], Create)
    assert code(one.receive(" " * (limit + 1), 0.0)) == "request_too_large"
    assert code(one.receive("é" * (limit // 2 + 1), 0.0)) == "request_too_large"
    assert one.receive(frame("ping"), 0.0) == [Send(PONG)]


def test_nothing_but_auth_and_ping_before_authentication() -> None:
    one = session(None)
    assert code(one.receive(frame("chat.create", body={}), 0.0)) == "not_authenticated"
    assert code(one.receive(frame("stream.subscribe", request_id=RID), 0.0)) == "not_authenticated"
    assert one.receive(frame("ping"), 0.0) == [Send(PONG)]
    assert one.receive(frame("auth", api_key="k"), 0.0) == [Authenticate("k")]
    assert one.authenticated(ME) == []
    assert one.receive(frame("chat.create", body={}), 0.0) == [Create(None, {}, None)]


def test_a_wrong_key_closes_with_stop() -> None:
    effects = session(None).not_authenticated(error_body(ErrorCode.INVALID_API_KEY, "no"))
    assert isinstance(effects[0], Send)
    assert effects[1] == CloseSocket(CloseCase.INVALID_API_KEY)
    assert not CloseCase.INVALID_API_KEY.value.reconnect


def test_a_socket_keeps_its_principal() -> None:
    one = session()
    assert one.authenticated(ME) == []
    assert code(one.authenticated(Principal("other", "other", "free"))) == "invalid_frame"
    assert one.principal == ME


def test_a_socket_that_does_not_authenticate_is_overdue() -> None:
    assert session(None).overdue(4.9) is None
    assert session(None).overdue(5.1) is CloseCase.AUTH_TIMEOUT
    assert session().overdue(500.0) is None


def test_accepted_comes_before_the_reading_of_its_stream_e14() -> None:
    one = session()
    one.receive(frame("chat.create", ref="r", body={}), 0.0)
    first, second = one.accepted("r", Admission(RID))
    assert isinstance(first, Send)
    assert json.loads(first.frame) == {"type": "chat.accepted", "ref": "r", "request_id": RID}
    assert isinstance(second, Read)
    assert (second.request_id, second.after, second.owned) == (RID, None, True)
    assert one.creating == 0


def test_a_second_subscribe_changes_and_repeats_nothing_e8() -> None:
    one = session()
    (first,) = one.receive(frame("stream.subscribe", request_id=RID), 0.0)
    assert isinstance(first, Read)
    assert one.receive(frame("stream.subscribe", request_id=RID, after="1-5"), 0.0) == []
    one.reading_ended(RID, first.serial)
    assert isinstance(one.receive(frame("stream.subscribe", request_id=RID), 0.0)[0], Read)


def test_a_late_report_of_an_old_reading_does_not_end_the_new_one() -> None:
    one = session()
    (first,) = one.receive(frame("stream.subscribe", request_id=RID), 0.0)
    assert isinstance(first, Read)
    assert one.receive(frame("stream.unsubscribe", request_id=RID), 0.0) == [Unread(RID, first.serial)]
    (second,) = one.receive(frame("stream.subscribe", request_id=RID), 0.0)
    assert isinstance(second, Read)
    one.reading_ended(RID, first.serial)
    assert one.is_reading(RID, second.serial)
    one.reading_ended(RID, second.serial)
    assert one.receive(frame("stream.unsubscribe", request_id=RID), 0.0) == []


def test_streams_per_socket_are_bounded_and_come_free_again() -> None:
    one = session()
    one.receive(frame("chat.create", body={}), 0.0)
    one.receive(frame("stream.subscribe", request_id="a"), 0.0)
    assert code(one.receive(frame("chat.create", ref=1, body={}), 0.0)) == "too_many_streams"
    assert code(one.receive(frame("stream.subscribe", request_id="b"), 0.0)) == "too_many_streams"
    assert code(one.refused(None, ApiError(ErrorCode.QUEUE_FULL, "x"))) == "queue_full"
    assert isinstance(one.receive(frame("chat.create", body={}), 0.0)[0], Create)


def test_cancel_knows_whether_this_socket_reads_the_stream() -> None:
    one = session()
    (reading,) = one.receive(frame("stream.subscribe", request_id=RID), 0.0)
    assert isinstance(reading, Read)
    assert one.receive(frame("chat.cancel", request_id=RID), 0.0) == [Cancel(None, RID, reading.serial)]
    assert one.receive(frame("chat.cancel", request_id="b"), 0.0) == [Cancel(None, "b", None)]
    assert code(one.receive(frame("chat.cancel", request_id="c"), 0.0)) == "rate_limited"
    one.cancel_done()
    assert isinstance(one.receive(frame("chat.cancel", request_id="c"), 0.0)[0], Cancel)


def test_too_many_frames_end_the_socket_after_a_burst() -> None:
    one = session()
    for _ in range(40):
        assert one.receive(frame("ping"), 0.0) == [Send(PONG)]
    *error, close = one.receive(frame("ping"), 0.0)
    assert code(error) == "rate_limited"
    assert close == CloseSocket(CloseCase.TOO_MANY_FRAMES)
    assert one.receive(frame("ping"), 100.0) == []


def test_frames_at_the_allowed_rate_go_on_for_ever() -> None:
    one = session()
    assert all(one.receive(frame("ping"), n / 9.9) == [Send(PONG)] for n in range(1000))


def test_a_draining_socket_takes_no_new_request_q1() -> None:
    one = session()
    one.draining = True
    assert one.receive(frame("chat.create", body={}), 0.0) == [], "the close that follows says it all"
    assert one.creating == 0


def test_keys_and_prompts_are_not_in_reprs() -> None:
    effects = session(None).receive(frame("auth", api_key="sk-secret"), 0.0)
    effects += session().receive(frame("chat.create", body="secret"), 0.0)
    assert "secret" not in repr(effects)


def test_close_codes_are_distinct_and_fit_a_close_frame() -> None:
    assert len({case.value.code for case in CloseCase}) == len(CloseCase)
    assert all(len(case.value.reason.encode()) <= 123 for case in CloseCase)


def encoded(item: StreamEntry) -> dict[str, Any]:
    return dict(json.loads(StreamFrames(RID).encode(item)))


def test_status_frames() -> None:
    accepted = Accepted(tenant="t", tier="paid", model="m", created_ms=1)
    started = Started(worker_id="w", model_revision="1")
    items = [
        StreamEntry(ACCEPTED, accepted),
        StreamEntry(MODERATED, Moderated(prompt_tokens=1)),
        StreamEntry(DISPATCHED, Dispatched(worker_id="w")),
        StreamEntry(StreamId(1, 0), started),
        StreamEntry(StreamId(2, 0), started),
    ]
    frames = [encoded(item) for item in items]
    assert [f["status"] for f in frames] == ["accepted", "moderated", "dispatched", "started", "resumed"]
    assert [f["offset"] for f in frames] == ["0-1", "0-2", "0-3", "1-0", "2-0"]
    assert all(f["type"] == "stream.status" and f["request_id"] == RID for f in frames)


def test_the_first_status_frame_tells_a_degraded_request_and_what_serves_it() -> None:
    degraded = Degraded(step="standard_smaller_model", reason="slow")
    accepted = Accepted(tenant="t", tier="free", model="small", created_ms=1, degraded=degraded)
    frame = encoded(StreamEntry(ACCEPTED, accepted))
    assert frame["status"] == "accepted"
    assert frame["model"] == "small"
    assert frame["degraded"] == {"step": "standard_smaller_model", "reason": "slow"}
    assert "degraded" not in encoded(
        StreamEntry(ACCEPTED, accepted.model_copy(update={"degraded": None}))
    )


@given(st.text(), st.integers(0, 3))
def test_text_frames_hold_any_text_on_one_line_a1_a10(words: str, index: int) -> None:
    item = StreamEntry(StreamId(3, 42), Text(words, (1,), index))
    assert encoded(item) == {
        "type": "stream.text", "request_id": RID, "offset": "3-42", "index": index, "text": words,
    }  # fmt: skip
    assert len(StreamFrames(RID).encode(item).decode().splitlines()) == 1


def test_end_frames() -> None:
    usage = Usage(prompt_tokens=2, completion_tokens=3)
    reasons = [FinishReason.LENGTH]
    done = encoded(
        StreamEntry(SEAL, Terminal(status=Status.COMPLETED, finish_reasons=reasons, usage=usage))
    )
    assert done["type"] == "stream.end"
    assert done["offset"] == str(SEAL)
    assert (done["status"], done["finish_reason"], done["error"]) == ("completed", "length", None)
    assert done["usage"]["total_tokens"] == 5
    assert "finish_reasons" not in done
    several = Terminal(
        status=Status.COMPLETED, finish_reasons=[*reasons, FinishReason.STOP], usage=usage
    )
    assert encoded(StreamEntry(SEAL, several))["finish_reasons"] == ["length", "stop"]
    cancelled = encoded(StreamEntry(SEAL, Terminal(status=Status.CANCELLED)))
    assert (cancelled["finish_reason"], cancelled["error"]["code"]) == (None, "cancelled")
