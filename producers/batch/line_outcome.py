"""What the end of a line's request means for the line. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from contracts.batch import BatchRecord
from contracts.entries import Accepted, StreamEntry
from contracts.errors import ErrorCode, error_body
from contracts.reply import Reply
from contracts.tiers import Status
from infra.settings import Settings
from streaming_edge.terminal import terminal_error

from ..request_times import reply_facts
from .endpoints import Answer
from .results import LineResult, answered, refused

#: Requests made of one line, the first included.
MAX_ATTEMPTS: Final = 8
#: Ends that say nothing about the request: it is made again.
_AGAIN: Final = frozenset(
    {
        ErrorCode.REQUEST_LOST,
        ErrorCode.WORKER_LOST,
        ErrorCode.UNAVAILABLE,
        ErrorCode.MODERATION_UNAVAILABLE,
        ErrorCode.STREAM_LOST,
        ErrorCode.DEADLINE_EXCEEDED,
    }
)
#: Refusals at admission that pass: the line waits for them.
PASSING: Final = frozenset(
    {
        ErrorCode.QUEUE_FULL,
        ErrorCode.OVERLOADED,
        ErrorCode.REQUESTS_LIMIT,
        ErrorCode.TOKENS_LIMIT,
        ErrorCode.CONCURRENCY_LIMIT,
        ErrorCode.ENQUEUED_LIMIT,
        ErrorCode.DAILY_QUOTA,
        ErrorCode.UNAVAILABLE,
    }
)
_CODES: Final = frozenset(code.value for code in ErrorCode)


def result_of(
    batch: BatchRecord,
    line: int,
    custom_id: str,
    request_id: str,
    answer: Answer,
    entries: Sequence[StreamEntry],
    settings: Settings,
    attempt: int,
) -> LineResult | None:
    """The result of a line whose request has ended; None where the request has to be made again.

    Args:
        entries: the request's whole stream.
        attempt: which one it was, from 0.
    """
    reply = Reply().extend(entries)
    if reply.terminal is None or not isinstance(entries[0].entry, Accepted):
        error = error_body(ErrorCode.STREAM_LOST, "The reply's token stream was lost.")
    else:
        ended = terminal_error(reply.terminal)
        if ended is None:
            facts = reply_facts(settings, request_id, entries[0].entry)
            body = answer(facts, entries)
            return answered(batch, line, custom_id, request_id, body, reply.usage)
        error = ended
    again = error.code in _CODES and ErrorCode(error.code) in _AGAIN
    if again and attempt + 1 < MAX_ATTEMPTS:
        return None
    return refused(batch, line, custom_id, request_id, error, reply.usage)


def is_cut_off(entries: Sequence[StreamEntry]) -> bool:
    """Whether a request was cancelled, as is done with those that run when their batch has to end."""
    terminal = Reply().extend(entries).terminal
    return terminal is not None and terminal.status is Status.CANCELLED
