"""How a terminal entry is told to clients: usage, and an error wherever it did not complete."""

from __future__ import annotations

from typing import Any

from contracts.entries import Terminal
from contracts.errors import ErrorBody, ErrorCode, error_body
from contracts.records import Usage
from contracts.stream_ids import MAX_PART, StreamId
from contracts.tiers import Status

#: Reading after this position gives the terminal entry alone.
BEFORE_SEAL = StreamId(MAX_PART, MAX_PART - 1)

_DEFAULT_ERRORS = {
    Status.FAILED: (ErrorCode.INTERNAL, "The reply failed."),
    Status.CANCELLED: (ErrorCode.CANCELLED, "The reply was cancelled."),
    Status.REFUSED: (ErrorCode.CONTENT_FILTER, "The request was refused."),
    Status.EXPIRED: (ErrorCode.DEADLINE_EXCEEDED, "The request was not served before its deadline."),
}


def terminal_error(terminal: Terminal) -> ErrorBody | None:
    """The error of a request that did not complete; None when it did."""
    if terminal.status is Status.COMPLETED:
        return None
    return terminal.error or error_body(*_DEFAULT_ERRORS[terminal.status])


def usage_object(usage: Usage) -> dict[str, Any]:
    """``usage`` as the OpenAI API shows it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
