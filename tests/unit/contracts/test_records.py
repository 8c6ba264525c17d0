import json
from typing import Any

import pytest

from contracts.errors import RecordError
from contracts.identity import make_request_id
from contracts.records import Message, RequestRecord, Sampling, decode
from contracts.tiers import QueueClass

RID = make_request_id(1_700_000_000_000, bytes(10))


def record(**changes: Any) -> RequestRecord:
    facts: dict[str, Any] = {
        "request_id": RID,
        "tenant": "t1",
        "key_id": "k1",
        "tier": "paid",
        "queue_class": QueueClass.INTERACTIVE,
        "model": "m",
        "pool": "default",
        "created_ms": 1,
        "deadline_ms": 2,
        "sampling": Sampling(),
        "messages": [Message(role="user", content="👩‍💻 你好 ďábel\u2028x")],
    }
    return RequestRecord(**{**facts, **changes})


def test_a_record_survives_the_wire() -> None:
    assert decode(RequestRecord, record().encode()) == record()


def test_g11_non_ascii_is_not_escaped_on_the_wire() -> None:
    content = "漢" * 1_000
    size = len(record(messages=[Message(role="user", content=content)]).encode())
    assert size < len(content.encode()) + 1_000


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"not json", "malformed"),
        (b"{", "malformed"),
        (b"\xff", "malformed"),
        (b"[]", "malformed"),
        (b"null", "malformed"),
        (b'"str"', "malformed"),
        (None, "malformed"),
        (b"[" * 900 + b"]" * 900, "malformed"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "malformed"),
        (b"{}", "invalid"),
        (b'{"request_id": 7}', "invalid"),
    ],
)
def test_g5_bytes_that_are_no_record_raise_a_record_error(value: bytes | None, reason: str) -> None:
    with pytest.raises(RecordError) as caught:
        decode(RequestRecord, value)
    assert caught.value.reason == reason
    assert caught.value.request_id is None


def changed(**changes: Any) -> bytes:
    return json.dumps({**json.loads(record().encode()), **changes}).encode()


def test_g16_an_unknown_field_is_ignored() -> None:
    assert decode(RequestRecord, changed(foo=1)) == record()


def test_g16_a_record_of_an_older_version_has_no_grace_time_and_runs_to_its_end() -> None:
    raw = json.loads(record(leave_grace_ms=5).encode())
    assert decode(RequestRecord, json.dumps(raw).encode()).leave_grace_ms == 5
    del raw["leave_grace_ms"]
    assert decode(RequestRecord, json.dumps(raw).encode()).leave_grace_ms is None


def test_g16_a_record_without_version_is_of_version_one() -> None:
    raw = json.loads(record().encode())
    del raw["schema_version"]
    assert decode(RequestRecord, json.dumps(raw).encode()) == record()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema_version": 2}, "newer_schema"),
        ({"schema_version": "1"}, "invalid"),
        ({"schema_version": True}, "invalid"),
        ({"queue_class": "vip"}, "invalid"),
        ({"messages": None}, "invalid"),
    ],
)
def test_g16_what_this_version_cannot_know_is_dead_lettered_with_its_request(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RecordError) as caught:
        decode(RequestRecord, changed(**changes))
    assert (caught.value.reason, caught.value.request_id) == (reason, RID)


def test_a_record_error_names_fields_and_never_values() -> None:
    with pytest.raises(RecordError) as caught:
        decode(RequestRecord, changed(messages=[{"role": "secret words", "content": 3}]))
    assert "secret" not in str(caught.value)
    assert "messages" in caught.value.detail
