"""A reply that its caller asked to keep (``store: true``), as it is stored and read again."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from .degraded import Degraded
from .errors import ErrorBody
from .keep import Keep, ReplyKind
from .records import Message, OutcomeChoice, OutcomeRecord, RequestRecord, Usage
from .tiers import Status


class StoredReply(BaseModel):
    """One kept request and what was answered.

    Attributes:
        id: the request id.
        model: the model that serves it.
        created / ended: acceptance and end, Unix seconds; ``ended`` is None while it has not ended.
        status: None while it has not ended; its token stream then says how far it is.
        messages: what the request itself brought, without stored history.
        choices: the text that was out at the end; partial unless completed.
        metadata: as the caller attached it last.
        params: the request's own parameters as its object echoes them.
        degraded: what it got less of because of overload.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    kind: ReplyKind
    tenant: str
    model: str
    created: int
    ended: int | None = None
    status: Status | None = None
    messages: list[Message] = Field(default_factory=list)
    choices: list[OutcomeChoice] = Field(default_factory=list)
    usage: Usage = Field(default_factory=Usage)
    metadata: dict[str, str] = Field(default_factory=dict)
    error: ErrorBody | None = None
    conversation_id: str | None = None
    previous_response_id: str | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    degraded: Degraded | None = None


def reply_in_progress(request: RequestRecord) -> StoredReply | None:
    """What is known of a kept request when it is accepted; None where it is not to be kept."""
    return _known(request, request.keep) if request.keep is not None else None


def ended_reply(outcome: OutcomeRecord) -> StoredReply | None:
    """What is stored of a kept request that has ended; None where it is not to be kept."""
    if outcome.keep is None:
        return None
    end = {
        "ended": outcome.finished_ms // 1000,
        "status": outcome.status,
        "choices": outcome.choices,
        "usage": outcome.usage,
        "error": outcome.error,
    }
    return _known(outcome, outcome.keep).model_copy(update=end)


def _known(record: RequestRecord | OutcomeRecord, keep: Keep) -> StoredReply:
    return StoredReply(
        id=record.request_id,
        kind=keep.kind,
        tenant=record.tenant,
        model=record.model,
        created=record.created_ms // 1000,
        messages=record.turn,
        metadata=keep.metadata,
        conversation_id=record.conversation_id,
        previous_response_id=keep.previous_response_id,
        params=keep.params,
        degraded=record.degraded,
    )
