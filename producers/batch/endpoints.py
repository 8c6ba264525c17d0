"""What a line of a batch becomes: the step between a line and the intake, one for each endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from contracts.entries import StreamEntry, Terminal
from contracts.identity import Principal
from contracts.reply import Reply
from contracts.tiers import Status
from infra.settings import Settings

from ..chat_request import ChatRequest, parse_chat_request
from ..completion import CompletionBuilder
from ..request_times import ReplyFacts
from ..responses.body import parse_response_body
from ..responses.objects import ResponseFacts, response_of

#: From the facts and the whole stream of a completed request to what the endpoint's call would have answered.
Answer = Callable[[ReplyFacts, Iterable[StreamEntry]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A line's request.

    Attributes:
        chat: it has no reader, and runs to its end without one.
    """

    chat: ChatRequest
    answer: Answer


#: From a line's body, the settings and who made the batch to the line's request. Pure; raises the
#: :class:`contracts.errors.ApiError` that the endpoint's call would have refused the body with.
Parse = Callable[[dict[str, Any], Settings, Principal], LineRequest]


def _chat_completion(body: dict[str, Any], settings: Settings, principal: Principal) -> LineRequest:
    chat = replace(parse_chat_request(body, settings, principal), leave_grace_ms=None)
    return LineRequest(chat, _completion)


def _completion(facts: ReplyFacts, entries: Iterable[StreamEntry]) -> dict[str, Any]:
    builder = CompletionBuilder()
    builder.extend(entries)
    return builder.completion(facts)


def _response(body: dict[str, Any], settings: Settings, principal: Principal) -> LineRequest:
    """A line's response is kept only where it says so."""
    call = parse_response_body({**body, "store": body.get("store") or False}, settings, principal)
    chat = replace(call.request([]), leave_grace_ms=None)

    def answer(facts: ReplyFacts, entries: Iterable[StreamEntry]) -> dict[str, Any]:
        reply = Reply().extend(entries)
        response = ResponseFacts(
            request_id=facts.request_id,
            created=facts.created_ms // 1000,
            model=facts.model,
            keep=call.keep,
            conversation_id=None,
            messages=chat.messages,
            stored=chat.keep is not None,
            degraded=facts.degraded,
        )
        return response_of(response, reply, reply.terminal or Terminal(status=Status.FAILED))

    return LineRequest(chat, answer)


#: How bodies are read, by the address that a batch and its lines name.
ENDPOINTS: dict[str, Parse] = {
    "/v1/chat/completions": _chat_completion,
    "/v1/responses": _response,
}
