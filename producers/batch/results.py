"""The results of a batch's lines: how one is written, kept until the end, and counted. Pure.

A result is one record of a segment, an append-only file on the storage::

    <line> <output|error> <input tokens> <cached> <output tokens> TAB <JSON of the result file's line> LF

The JSON has neither TAB nor LF in it, so a record that was cut off by a crash is seen, and is none. Several
runners may have written results of the same line; the first in the order of the segments is the one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from contracts.batch import BatchRecord, BatchStatus, BatchUsage, Counts, ResultKind
from contracts.errors import ErrorBody
from contracts.records import Usage
from streaming_edge.json_text import json_text

from .ids import result_id

_RECORD: Final = re.compile(rb"(\d+) (output|error) (\d+) (\d+) (\d+)\t([^\t\n]+)\n")
_CUT_OFF: Final = {
    BatchStatus.EXPIRED: ("batch_expired", "The batch's completion window was over before this line."),
    BatchStatus.CANCELLED: ("batch_cancelled", "The batch was cancelled before this line was done."),
}


@dataclass(frozen=True, slots=True)
class LineResult:
    """What became of a line.

    Attributes:
        text: the line of the result file, without its LF.
    """

    line: int
    kind: ResultKind
    text: bytes
    usage: Usage = field(default_factory=Usage)

    def encode(self) -> bytes:
        """As a record of a segment."""
        usage = self.usage
        numbers = b"%d %d %d" % (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        return b"%d %b %b\t%b\n" % (self.line, self.kind.value.encode(), numbers, self.text)


def decode_result(record: bytes) -> LineResult | None:
    """Inverse of :meth:`LineResult.encode`; None for what is no whole record."""
    found = _RECORD.fullmatch(record)
    if found is None:
        return None
    line, kind, prompt, cached, completion, text = found.groups()
    usage = Usage(
        prompt_tokens=int(prompt), cached_tokens=int(cached), completion_tokens=int(completion)
    )
    return LineResult(int(line), ResultKind(kind.decode()), text, usage)


def answered(
    batch: BatchRecord, line: int, custom_id: str, request_id: str, body: Mapping[str, Any], usage: Usage
) -> LineResult:
    """A line with an answer.

    Args:
        body: what the endpoint's call would have answered.
    """
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return _result(batch, line, custom_id, ResultKind.OUTPUT, response, None, usage)


def refused(
    batch: BatchRecord,
    line: int,
    custom_id: str,
    request_id: str,
    error: ErrorBody,
    usage: Usage | None = None,
) -> LineResult:
    """A line whose request ended in an error, or was none: as the call would have answered.

    Args:
        request_id: of the request; where none was made, any id that names the line.
    """
    body = {"error": error.model_dump()}
    response = {"status_code": error.status, "request_id": request_id, "body": body}
    return _result(batch, line, custom_id, ResultKind.ERROR, response, None, usage or Usage())


def cut_off(batch: BatchRecord, line: int, custom_id: str, ending: BatchStatus) -> LineResult:
    """A line without a result when its batch had to end."""
    code, message = _CUT_OFF[ending]
    error = {"code": code, "message": message}
    return _result(batch, line, custom_id, ResultKind.ERROR, None, error, Usage())


def _result(
    batch: BatchRecord,
    line: int,
    custom_id: str,
    kind: ResultKind,
    response: Mapping[str, Any] | None,
    error: Mapping[str, Any] | None,
    usage: Usage,
) -> LineResult:
    text = json_text(
        {
            "id": result_id(batch, line),
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    )
    return LineResult(line, kind, text, usage)


class Tally:
    """Which lines have results, and how many of each kind. Holds a byte for each line of the file."""

    def __init__(self) -> None:
        self._done = bytearray()
        self.completed = 0
        self.failed = 0
        self.usage = BatchUsage()

    def has(self, line: int) -> bool:
        """Whether a line has a result."""
        return line < len(self._done) and bool(self._done[line])

    def add(self, result: LineResult) -> bool:
        """Count a result; False where its line has one already."""
        line = result.line
        if self.has(line):
            return False
        if line >= len(self._done):
            self._done.extend(bytes(line + 1 - len(self._done) + 4096))
        self._done[line] = 1
        if result.kind is ResultKind.OUTPUT:
            self.completed += 1
        else:
            self.failed += 1
        self.usage = BatchUsage(
            input_tokens=self.usage.input_tokens + result.usage.prompt_tokens,
            cached_tokens=self.usage.cached_tokens + result.usage.cached_tokens,
            output_tokens=self.usage.output_tokens + result.usage.completion_tokens,
        )
        return True

    @property
    def count(self) -> int:
        """How many lines have results."""
        return self.completed + self.failed

    def counts(self, total: int) -> Counts:
        """As a batch's record holds them."""
        return Counts(total=total, completed=self.completed, failed=self.failed)
