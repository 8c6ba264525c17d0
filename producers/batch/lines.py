"""A batch's input file: bytes to numbered lines, lines to requests. One function each, for every stage.

Lines end with LF; a CR before it and a byte-order mark at the start of the file are no part of them. Lines
without anything but white space are skipped, but have a number. Decided here: a line that is no request
refuses the whole batch, with its number; what is wrong inside a request's body is that line's result.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson

from contracts.batch import LineFault

MAX_CUSTOM_ID_CHARACTERS: Final = 512
#: More faults than these are not listed.
MAX_FAULTS: Final = 100
#: Fields of a body that ask for what a line cannot have, and the values that ask for nothing.
_NOT_IN_LINES: Final[dict[str, tuple[object, ...]]] = {
    "stream": (False,),
    "stream_options": (),
    "n": (1,),
    "background": (False,),
    "conversation": (),
    "conversation_id": (),
    "previous_response_id": (),
}


class BadFile(Exception):
    """The bytes are no file of lines; the message is for people.

    Attributes:
        code: for programs.
        line: where, if that is known.
        too_large: whether there is too much, rather than something wrong with it.
    """

    def __init__(
        self, code: str, message: str, line: int | None = None, *, too_large: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.line = line
        self.too_large = too_large


class LineSplitter:
    """Cuts a file that comes in pieces into its lines. Holds one line and one piece at most.

    Args:
        max_line_bytes: longer lines are refused; None for a file that was checked before.
    """

    def __init__(self, max_line_bytes: int | None = None) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._number = 0

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """The lines that end in this piece, numbered from 1, without the empty ones.

        Raises:
            BadFile: a line is too long.
        """
        *whole, rest = piece.split(b"\n")
        for end in whole:
            yield from self._line(end)
        if rest:
            self._hold(rest)

    def finish(self) -> Iterator[tuple[int, bytes]]:
        """The last line, where no LF ends it."""
        if self._rest_bytes:
            yield from self._line(b"")

    def _line(self, end: bytes) -> Iterator[tuple[int, bytes]]:
        self._hold(end)
        line = b"".join(self._rest)
        self._rest.clear()
        self._rest_bytes = 0
        self._number += 1
        if self._number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        line = line.strip(b" \t\r")
        if line:
            yield self._number, line

    def _hold(self, piece: bytes) -> None:
        self._rest.append(piece)
        self._rest_bytes += len(piece)
        limit = self._max_line_bytes
        if limit is not None and self._rest_bytes > limit + len(codecs.BOM_UTF8) + 1:
            number = self._number + 1
            message = f"Line {number} is longer than {limit} bytes."
            raise BadFile("line_too_long", message, number, too_large=True)


class FileCheck:
    """What is checked of a batch's input while it is uploaded: UTF-8, and the limits."""

    def __init__(self, max_bytes: int, max_lines: int, max_line_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_lines = max_lines
        self._splitter = LineSplitter(max_line_bytes)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.size_bytes = 0
        self._has_lines = False

    def feed(self, piece: bytes) -> None:
        """Check the next piece.

        Raises:
            BadFile: what is wrong.
        """
        self.size_bytes += len(piece)
        if self.size_bytes > self._max_bytes:
            raise BadFile(
                "file_too_large", f"The file is larger than {self._max_bytes} bytes.", too_large=True
            )
        self._decode(piece)
        self._count(self._splitter.feed(piece))

    def finish(self) -> None:
        """Check that it ends well.

        Raises:
            BadFile: what is wrong.
        """
        self._decode(b"", final=True)
        self._count(self._splitter.finish())
        if not self._has_lines:
            raise BadFile("empty_file", "The file holds no requests.")

    def _decode(self, piece: bytes, *, final: bool = False) -> None:
        try:
            self._decoder.decode(piece, final)
        except UnicodeDecodeError:
            raise _not_utf8() from None
        if b"\0" in piece:  # UTF-16 without a mark; no JSON has this byte
            raise _not_utf8()

    def _count(self, lines: Iterator[tuple[int, bytes]]) -> None:
        for number, _ in lines:
            self._has_lines = True
            if number > self._max_lines:
                raise _too_many(self._max_lines)


def _too_many(max_lines: int) -> BadFile:
    message = f"The file has more than {max_lines} lines."
    return BadFile("too_many_requests", message, too_large=True)


def _not_utf8() -> BadFile:
    return BadFile("invalid_encoding", "The file must be UTF-8.")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch.

    Attributes:
        number: its line in the input file, from 1.
    """

    number: int
    custom_id: str
    body: dict[str, Any]


def parse_line(number: int, raw: bytes, endpoint: str) -> BatchLine | LineFault:
    """The request in a line, or why there is none. Messages repeat nothing of the line."""

    def fault(code: str, message: str, param: str | None = None) -> LineFault:
        return LineFault(code=code, message=message, param=param, line=number)

    try:
        line = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return fault("invalid_json_line", "This line is not valid JSON in UTF-8.")
    if not isinstance(line, dict):
        return fault("invalid_json_line", "This line is not a JSON object.")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        message = f"'custom_id' must be a string of 1 to {MAX_CUSTOM_ID_CHARACTERS} characters."
        return fault("invalid_custom_id", message, "custom_id")
    if line.get("method") != "POST":
        return fault("invalid_method", "'method' must be POST.", "method")
    if line.get("url") != endpoint:
        return fault("invalid_url", "'url' must be the batch's endpoint.", "url")
    body = line.get("body")
    if not isinstance(body, dict):
        return fault("invalid_request", "'body' must be a JSON object.", "body")
    for field, nothing in _NOT_IN_LINES.items():
        value = body.get(field)
        if value is not None and value not in nothing:
            return fault(
                "unsupported_parameter", f"'{field}' cannot be used in a batch.", f"body.{field}"
            )
    return BatchLine(number, custom_id, body)


class Validation:
    """Collects what is wrong with a batch's input, line by line."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._seen: set[bytes] = set()
        self._faults: list[LineFault] = []
        self.total = 0

    def add(self, number: int, raw: bytes) -> None:
        """Look at a line."""
        self.total += 1
        found = parse_line(number, raw, self._endpoint)
        if isinstance(found, BatchLine):
            digest = hashlib.sha256(found.custom_id.encode()).digest()[:16]
            if digest not in self._seen:
                self._seen.add(digest)
                return
            message = "An earlier line has the same 'custom_id'."
            found = LineFault(
                code="duplicate_custom_id", message=message, param="custom_id", line=number
            )
        if len(self._faults) < MAX_FAULTS:
            self._faults.append(found)

    def finish(self) -> list[LineFault]:
        """Everything that is wrong; the batch can be run if that is nothing."""
        if not self.total:
            return [LineFault(code="empty_file", message="The input file holds no requests.")]
        return self._faults
