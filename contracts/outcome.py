"""Building the outcome record from a request and its token stream.

Whoever holds a request's Kafka position when its stream is sealed publishes the outcome, even where
someone else wrote the seal; the position is committed after that. So every sealed request has an outcome,
at least once.
"""

from __future__ import annotations

from .entries import Accepted
from .records import OutcomeRecord, QueuedRecord, RequestRecord
from .reply import Reply


def outcome_of_stream(
    request_id: str, accepted: Accepted, reply: Reply, *, now_ms: int
) -> OutcomeRecord:
    """The outcome of a sealed request whose record is lost, from its stream alone; its turn is unknown.

    Raises:
        ValueError: the stream is not sealed.
    """
    if reply.terminal is None:
        raise ValueError("a request without a seal has no outcome")
    return OutcomeRecord(
        request_id=request_id,
        tenant=accepted.tenant,
        key_id=accepted.key_id,
        tier=accepted.tier,
        model=accepted.model,
        conversation_id=accepted.conversation_id,
        created_ms=accepted.created_ms,
        finished_ms=now_ms,
        status=reply.terminal.status,
        choices=reply.outcome_choices(),
        usage=reply.usage,
        degraded=accepted.degraded,
        error=reply.terminal.error,
        attempts=reply.attempts,
        duration_ms=max(0, now_ms - accepted.created_ms),
    )


def make_outcome(
    request: RequestRecord | QueuedRecord, reply: Reply, *, now_ms: int, ttft_ms: int | None = None
) -> OutcomeRecord:
    """The outcome of a sealed request.

    Args:
        request: the request as its holder has it.
        reply: the fold of the whole sealed stream.
        now_ms: Unix milliseconds.
        ttft_ms: acceptance to first token, where the caller knows it.

    Raises:
        ValueError: the stream is not sealed.
    """
    if reply.terminal is None:
        raise ValueError("a request without a seal has no outcome")
    return OutcomeRecord(
        request_id=request.request_id,
        tenant=request.tenant,
        key_id=request.key_id,
        tier=request.tier,
        model=request.model,
        conversation_id=request.conversation_id,
        created_ms=request.created_ms,
        finished_ms=now_ms,
        turn=request.turn,
        status=reply.terminal.status,
        choices=reply.outcome_choices(),
        usage=reply.usage,
        degraded=request.degraded,
        keep=request.keep,
        error=reply.terminal.error,
        attempts=reply.attempts,
        ttft_ms=ttft_ms,
        duration_ms=max(0, now_ms - request.created_ms),
    )
