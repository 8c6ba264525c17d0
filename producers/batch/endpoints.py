"""What a line of a batch becomes: the step between a line and the intake, one for each endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from contracts.entries import StreamEntry, Terminal
from contracts.identity import Principal, make_request_id
from contracts.reply import Reply
from contracts.tiers import Status
from infra.settings import Settings

from ..chat_request import ChatRequest, parse_chat_request
from ..completion import CompletionBuilder
from ..request_times import ReplyFacts
from ..responses.body import parse_response_body
from ..responses.objects import Ending, ResponseFacts, ended_response

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


class Endpoint(Protocol):
    """An endpoint whose requests can be lines of a batch. Pure."""

    def request_id(self, created_ms: int, identifying: bytes) -> str:
        """The id of a line's request: the same arguments give the same id.

        Args:
            created_ms: Unix milliseconds.
            identifying: 10 bytes that name the line.
        """

    def parse(self, body: dict[str, Any], settings: Settings, principal: Principal) -> LineRequest:
        """The request in a line's body.

        Args:
            principal: who made the batch.

        Raises:
            ApiError: what the endpoint's call would have refused it with.
        """


class ChatCompletions:
    """``/v1/chat/completions``."""

    def request_id(self, created_ms: int, identifying: bytes) -> str:
        """See :class:`Endpoint`."""
        return make_request_id(created_ms, identifying)

    def parse(self, body: dict[str, Any], settings: Settings, principal: Principal) -> LineRequest:
        """See :class:`Endpoint`."""
        chat = replace(parse_chat_request(body, settings, principal), leave_grace_ms=None)
        return LineRequest(chat, _completion)


def _completion(facts: ReplyFacts, entries: Iterable[StreamEntry]) -> dict[str, Any]:
    builder = CompletionBuilder()
    builder.extend(entries)
    return builder.completion(facts)


class Responses:
    """``/v1/responses``. A line's response is kept only where it says so."""

    def request_id(self, created_ms: int, identifying: bytes) -> str:
        """See :class:`Endpoint`."""
        return make_request_id(created_ms, identifying)

    def parse(self, body: dict[str, Any], settings: Settings, principal: Principal) -> LineRequest:
        """See :class:`Endpoint`."""
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
            terminal = reply.terminal or Terminal(status=Status.FAILED)
            text = reply.choices[0].text if 0 in reply.choices else ""
            return ended_response(response, Ending.of(terminal), text, reply.usage)

        return LineRequest(chat, answer)


#: By the address that a batch and its lines name.
ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
}
