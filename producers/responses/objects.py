"""A response as the API shows it, at any moment of its life. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from contracts.conversation import Turn
from contracts.degraded import Degraded
from contracts.entries import Accepted, Terminal
from contracts.errors import ErrorBody
from contracts.keep import Keep
from contracts.records import Message, Usage
from contracts.reply import Reply
from contracts.stored_reply import StoredReply
from contracts.tiers import FinishReason, Status
from streaming_edge.terminal import terminal_error

from ..message_items import MessageItem, OutputTextPart, message_item
from .ids import response_id_of

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
_CLOSED = ConfigDict(extra="forbid")


@with_config(_CLOSED)
class ResponseInputDetails(TypedDict):
    """How many of the prompt's tokens were found in the KV cache; what was written to it is not counted."""

    cached_tokens: int
    cache_write_tokens: int


@with_config(_CLOSED)
class ResponseOutputDetails(TypedDict):
    """Always 0: no model here thinks apart from its text."""

    reasoning_tokens: int


@with_config(_CLOSED)
class ResponseUsage(TypedDict):
    """Tokens that were used."""

    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


@with_config(_CLOSED)
class ResponseError(TypedDict):
    """Why a response failed: one of the codes of docs/API.md."""

    code: str
    message: str


@with_config(_CLOSED)
class IncompleteDetails(TypedDict):
    """Why the text is cut off."""

    reason: Literal["max_output_tokens", "content_filter"]


_INCOMPLETE: Final[dict[FinishReason, IncompleteDetails]] = {
    FinishReason.LENGTH: {"reason": "max_output_tokens"},
    FinishReason.CONTENT_FILTER: {"reason": "content_filter"},
}


@with_config(_CLOSED)
class ConversationReference(TypedDict):
    """The conversation that a response is part of."""

    id: str


@with_config(_CLOSED)
class ResponseObject(TypedDict):
    """A response; ``output`` is empty until it has ended. ``degraded`` says what overload took from it."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[MessageItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationReference | None
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Literal["none"]
    tools: list[Any]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    degraded: NotRequired[Degraded]


@with_config(_CLOSED)
class ResponseDeleted(TypedDict):
    """A response is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseEvent(TypedDict):
    """One event of a response; what else it holds depends on its type."""

    type: str
    sequence_number: int


@dataclass(frozen=True, slots=True)
class ResponseFacts:
    """What is known of a response when it is accepted.

    Attributes:
        created: acceptance, Unix seconds.
        messages: its input; their number is in the id of its output.
        stored: whether it can be read again.
    """

    request_id: str
    created: int
    model: str
    keep: Keep
    conversation_id: str | None
    messages: list[Message]
    stored: bool = True
    degraded: Degraded | None = None

    @classmethod
    def of_stored(cls, reply: StoredReply) -> ResponseFacts:
        """Those of a kept one."""
        keep = Keep(
            kind=reply.kind,
            metadata=reply.metadata,
            params=reply.params,
            previous_response_id=reply.previous_response_id,
        )
        return cls(
            request_id=reply.id,
            created=reply.created,
            model=reply.model,
            keep=keep,
            conversation_id=reply.conversation_id,
            messages=reply.messages,
            degraded=reply.degraded,
        )

    def as_accepted(self, accepted: Accepted) -> ResponseFacts:
        """With what was decided when it was accepted."""
        return replace(self, model=accepted.model, degraded=accepted.degraded)

    @property
    def background(self) -> bool:
        """Whether it runs on without its caller."""
        return bool(self.keep.params.get("background"))

    def input_items(self) -> list[MessageItem]:
        """Its input, oldest first."""
        return [message_item(item) for item in self._turn(None).items()]

    def output_item(self, text: str, *, complete: bool = True) -> MessageItem:
        """Its output."""
        item = self._turn(text).items()[-1]
        return message_item(item._replace(complete=complete))

    @property
    def item_id(self) -> str:
        """The id of its output."""
        return self.output_item("")["id"]

    def _turn(self, reply: str | None) -> Turn:
        return Turn(
            request_id=self.request_id,
            created_ms=self.created * 1000,
            messages=self.messages,
            reply=reply,
            status=Status.COMPLETED,
        )


@dataclass(frozen=True, slots=True)
class Ending:
    """How a response ended."""

    status: ResponseStatus
    incomplete: IncompleteDetails | None = None
    error: ResponseError | None = None

    @classmethod
    def of(cls, terminal: Terminal) -> Ending:
        """Of a token stream's end."""
        return cls.of_status(terminal.status, terminal.finish_reasons, terminal_error(terminal))

    @classmethod
    def of_status(cls, status: Status, reasons: list[FinishReason], error: ErrorBody | None) -> Ending:
        """Of what an outcome says.

        Args:
            error: why it did not complete.
        """
        if status is Status.CANCELLED:
            return cls("cancelled")
        if error is not None:
            return cls(
                "failed", error={"code": error.code or "internal_error", "message": error.message}
            )
        reason = _INCOMPLETE.get(reasons[0]) if reasons else None
        if reason is not None:
            return cls("incomplete", incomplete=reason)
        return cls("completed")


def text_part(text: str) -> OutputTextPart:
    """The one part of an output message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage_of(usage: Usage) -> ResponseUsage:
    """``usage`` as the API shows it."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


def running_response(facts: ResponseFacts, status: Literal["queued", "in_progress"]) -> dict[str, Any]:
    """A response that has not ended."""
    return _response(facts, Ending(status), None, [], None)


def ended_response(
    facts: ResponseFacts, ending: Ending, text: str, usage: Usage, ended: int | None = None
) -> dict[str, Any]:
    """A response that has ended.

    Args:
        text: all of its text; no text of one that did not complete makes no output.
        ended: Unix seconds; None where that is not known, as token streams do not say.
    """
    whole = ending.status == "completed"
    output = [facts.output_item(text, complete=whole)] if text or whole else []
    return _response(facts, ending, usage_of(usage), output, ended if whole else None)


def response_of(facts: ResponseFacts, reply: Reply, terminal: Terminal) -> dict[str, Any]:
    """A response that has ended, from its whole token stream."""
    if reply.accepted is not None:
        facts = facts.as_accepted(reply.accepted)
    return ended_response(facts, Ending.of(terminal), reply.text, reply.usage)


def _response(
    facts: ResponseFacts,
    ending: Ending,
    usage: ResponseUsage | None,
    output: list[MessageItem],
    completed: int | None,
) -> dict[str, Any]:
    params = facts.keep.params
    shown: dict[str, Any] = {
        "id": response_id_of(facts.request_id),
        "object": "response",
        "created_at": facts.created,
        "completed_at": completed,
        "status": ending.status,
        "background": facts.background,
        "error": ending.error,
        "incomplete_details": ending.incomplete,
        "instructions": params.get("instructions"),
        "max_output_tokens": params.get("max_output_tokens"),
        "metadata": facts.keep.metadata,
        "model": facts.model,
        "output": output,
        "parallel_tool_calls": False,
        "previous_response_id": facts.keep.previous_response_id,
        "conversation": {"id": facts.conversation_id} if facts.conversation_id is not None else None,
        "store": facts.stored,
        "temperature": params.get("temperature"),
        "text": {"format": params.get("format", {"type": "text"})},
        "tool_choice": "none",
        "tools": [],
        "top_p": params.get("top_p"),
        "truncation": "disabled",
        "usage": usage,
        "user": params.get("user"),
    }
    if facts.degraded is not None:
        shown["degraded"] = facts.degraded.model_dump()
    return shown
