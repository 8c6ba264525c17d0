"""What a line of a batch becomes: the step between a line and the intake, one for each endpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from contracts.entries import StreamEntry
from contracts.identity import Principal, make_request_id
from infra.settings import Settings

from ..chat_request import ChatRequest, parse_chat_request
from ..completion import CompletionBuilder
from ..request_times import ReplyFacts


class Endpoint(Protocol):
    """An endpoint whose requests can be lines of a batch. Pure."""

    def request_id(self, created_ms: int, identifying: bytes) -> str:
        """The id of a line's request: the same arguments give the same id.

        Args:
            created_ms: Unix milliseconds.
            identifying: 10 bytes that name the line.
        """

    def parse(self, body: dict[str, Any], settings: Settings, principal: Principal) -> ChatRequest:
        """The request in a line's body: it has no reader, and runs to its end without one.

        Args:
            principal: who made the batch.

        Raises:
            ApiError: what the endpoint's call would have refused it with.
        """

    def answer(self, facts: ReplyFacts, entries: Iterable[StreamEntry]) -> dict[str, Any]:
        """What the endpoint's call would have answered, from the whole stream of a completed request."""


class ChatCompletions:
    """``/v1/chat/completions``."""

    def request_id(self, created_ms: int, identifying: bytes) -> str:
        """See :class:`Endpoint`."""
        return make_request_id(created_ms, identifying)

    def parse(self, body: dict[str, Any], settings: Settings, principal: Principal) -> ChatRequest:
        """See :class:`Endpoint`."""
        return replace(parse_chat_request(body, settings, principal), leave_grace_ms=None)

    def answer(self, facts: ReplyFacts, entries: Iterable[StreamEntry]) -> dict[str, Any]:
        """See :class:`Endpoint`."""
        builder = CompletionBuilder()
        builder.extend(entries)
        return builder.completion(facts)


#: By the address that a batch and its lines name.
ENDPOINTS: dict[str, Endpoint] = {"/v1/chat/completions": ChatCompletions()}
