"""A batch's input file: lines, limits, and what is wrong with it."""

from __future__ import annotations

import codecs
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.batch import LineFault
from producers.batch.lines import (
    MAX_FAULTS,
    BadFile,
    BatchLine,
    FileCheck,
    LineSplitter,
    Validation,
    parse_line,
)

CHAT = "/v1/chat/completions"


def line(custom_id: Any = "a", **more: Any) -> bytes:
    raw = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "default"}} | more
    return json.dumps(raw).encode()


def split(data: bytes, cuts: list[int] | None = None) -> list[tuple[int, bytes]]:
    splitter = LineSplitter(1000)
    places = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts or [])})
    found = []
    for start, end in pairwise(places):
        found += splitter.feed(data[start:end])
    return [*found, *splitter.finish()]


def checked(data: bytes, *, max_bytes: int = 10_000, max_lines: int = 5, piece: int = 7) -> FileCheck:
    check = FileCheck(max_bytes, max_lines, 500)
    for start in range(0, len(data), piece):
        check.feed(data[start : start + piece])
    check.finish()
    return check


@given(
    st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")), max_size=8),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.lists(st.integers(0, 300), max_size=12),
)
def test_lines_are_the_same_however_the_file_is_cut(
    lines: list[bytes], end: bytes, last_end: bool, cuts: list[int]
) -> None:
    data = end.join(lines) + (end if last_end else b"")
    expected = [
        (number, text.strip(b" \t\r"))
        for number, text in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1)
        if text.strip(b" \t\r")
    ]
    assert split(data, cuts) == expected


def test_a_byte_order_mark_is_no_part_of_the_first_line_K1() -> None:
    data = codecs.BOM_UTF8 + line("first") + b"\n" + line("second") + b"\n"
    checked(data)
    parsed = [parse_line(number, raw, CHAT) for number, raw in split(data, [1, 2])]
    assert [p.custom_id for p in parsed if isinstance(p, BatchLine)] == ["first", "second"]


@pytest.mark.parametrize("custom_id", [7, None, "", "x" * 513, ["a"]])
def test_an_id_that_is_no_text_is_named_with_its_line_K1(custom_id: Any) -> None:
    fault = parse_line(3, line(custom_id), CHAT)
    assert isinstance(fault, LineFault)
    assert (fault.code, fault.param, fault.line) == ("invalid_custom_id", "custom_id", 3)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16", "latin-1"])
def test_other_encodings_are_refused_at_upload_K2(encoding: str) -> None:
    with pytest.raises(BadFile, match="UTF-8") as caught:
        checked('{"custom_id": "é"}\n'.encode(encoding))
    assert not caught.value.too_large


def test_any_unicode_text_passes_whole_K2() -> None:
    text = "👩‍💻 你好 ďábel \u2028"
    data = line(text, body={"messages": text})
    checked(data, piece=1)
    parsed = parse_line(1, data, CHAT)
    assert isinstance(parsed, BatchLine)
    assert (parsed.custom_id, parsed.body["messages"]) == (text, text)


@pytest.mark.parametrize(
    "raw",
    [
        b"[1]",
        b'"x"',
        b"null",
        line(body="str"),
        b'{"custom_id":"a"}',
        b'{"custom_id": "a", ',
        b'{"custom_id": "hi \\ud83d", "method": "POST"}',
        b"\xff\xfe",
        b"NaN",
    ],
)
def test_what_is_no_request_is_a_fault_of_its_line_K4_A11(raw: bytes) -> None:
    validation = Validation(CHAT)
    for number, text in enumerate([line("a"), line("b"), raw, line("c"), line("d")], 1):
        validation.add(number, text)
    faults = validation.finish()
    assert [fault.line for fault in faults] == [3]
    assert validation.total == 5


@pytest.mark.parametrize(
    ("more", "code", "param"),
    [
        ({"body": {"stream": True}}, "unsupported_parameter", "body.stream"),
        ({"body": {"stream_options": {"include_usage": True}}}, "unsupported_parameter", None),
        ({"body": {"n": 4}}, "unsupported_parameter", "body.n"),
        ({"body": {"conversation_id": "c"}}, "unsupported_parameter", None),
        ({"url": "/v1/embeddings"}, "invalid_url", "url"),
        ({"method": "GET"}, "invalid_method", "method"),
    ],
)
def test_what_a_line_cannot_have_is_refused_at_validation_K7(
    more: dict[str, Any], code: str, param: str | None
) -> None:
    fault = parse_line(9, line(**more), CHAT)
    assert isinstance(fault, LineFault)
    assert (fault.code, fault.line) == (code, 9)
    assert param in (None, fault.param)


def test_fields_that_ask_for_nothing_are_absent_B10_C11() -> None:
    body = {"n": 1, "stream": False, "stream_options": None, "foo": 1}
    assert isinstance(parse_line(1, line(body=body), CHAT), BatchLine)


def test_the_second_line_of_an_id_is_at_fault() -> None:
    validation = Validation(CHAT)
    for number, custom_id in enumerate(["a", "b", "a"], 1):
        validation.add(number, line(custom_id))
    (fault,) = validation.finish()
    assert (fault.code, fault.line) == ("duplicate_custom_id", 3)


def test_not_more_faults_are_kept_than_are_listed() -> None:
    validation = Validation(CHAT)
    for number in range(1, 1000):
        validation.add(number, b"no")
    assert len(validation.finish()) == MAX_FAULTS


def test_limits_are_told_while_the_file_comes_K14() -> None:
    fits = b"\n".join(line(str(n)) for n in range(5))
    assert checked(fits).size_bytes == len(fits)
    too_large = {
        "file_too_large": (fits, {"max_bytes": 100}),
        "too_many_requests": (fits + b"\n" + line("6"), {}),
        "line_too_long": (line("x" * 600), {}),
    }
    for code, (data, limits) in too_large.items():
        with pytest.raises(BadFile) as caught:
            checked(data, **limits)
        assert (caught.value.code, caught.value.too_large) == (code, True)


def test_a_long_line_is_refused_before_it_has_come_whole_K14() -> None:
    check = FileCheck(10**9, 5, 500)
    for _ in range(5):
        check.feed(b"x" * 100)
    with pytest.raises(BadFile):
        check.feed(b"x" * 100)


def test_empty_lines_cannot_stand_for_many_K14() -> None:
    with pytest.raises(BadFile) as caught:
        checked(b"\n" * 6 + line())
    assert caught.value.code == "too_many_requests"


@pytest.mark.parametrize("data", [b"", b"\n\r\n \t\n", codecs.BOM_UTF8])
def test_a_file_without_requests_is_refused(data: bytes) -> None:
    with pytest.raises(BadFile) as caught:
        checked(data)
    assert caught.value.code == "empty_file"
