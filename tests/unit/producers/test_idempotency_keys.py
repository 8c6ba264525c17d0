"""Which calls are the same call: O5."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from contracts.errors import ApiError, ErrorCode
from producers.idempotency import once_of

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "seed": 1}


def digest(body: object) -> str:
    once = once_of("k", body)
    assert once is not None
    return once.digest


def test_without_a_key_there_is_nothing_to_compare() -> None:
    assert once_of(None, BODY) is None


def test_o5_the_order_of_fields_and_the_way_of_delivery_do_not_matter() -> None:
    assert digest(dict(reversed(BODY.items()))) == digest(BODY)
    assert digest(BODY | {"stream": True, "stream_options": {"include_usage": True}}) == digest(BODY)


@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"seed": None}, {"temperature": 0}, {"messages": []}, {"leave_grace_seconds": 0}],
)
def test_o5_anything_else_makes_another_body(change: dict[str, Any]) -> None:
    assert digest(BODY | change) != digest(BODY)


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "ä", "x" * 256, "\x7f"])
def test_a_key_is_short_and_visible(key: str) -> None:
    with pytest.raises(ApiError) as raised:
        once_of(key, BODY)
    assert (raised.value.status, raised.value.body.param) == (400, "Idempotency-Key")
    assert once_of("x" * 255, BODY) is not None


def test_a_body_too_deep_to_compare_is_refused_and_not_a_server_error() -> None:
    deep = orjson.loads(b'{"x":' + b"[" * 800 + b"]" * 800 + b"}")
    with pytest.raises(ApiError) as raised:
        once_of("k", deep)
    assert raised.value.code is ErrorCode.INVALID_REQUEST
