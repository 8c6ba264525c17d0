"""From a valid request of an HTTP call to an accepted one: what every route that makes replies does."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from contracts.entries import Accepted
from contracts.errors import ApiError, ErrorCode
from contracts.identity import Principal
from infra.live_settings import LiveSettings

from .chat_request import ChatRequest
from .chat_span import ChatSpan
from .http_scope import name_request, note_rate_limits
from .idempotency import once_of
from .protocols import ChatIntake
from .replies import Replies
from .request_times import ReplyFacts, created_ms_of, reply_facts


@dataclass(frozen=True, slots=True)
class Submitted:
    """An accepted request, whose reply is to be read."""

    facts: ReplyFacts
    span: ChatSpan


class Submitting:
    """Hands requests of HTTP calls to the intake."""

    def __init__(self, live: LiveSettings, intake: ChatIntake, replies: Replies) -> None:
        self._live = live
        self._intake = intake
        self._replies = replies

    async def submit(
        self, principal: Principal, request: Request, chat: ChatRequest, body: object, *, stream: bool
    ) -> Submitted:
        """Have a request accepted, once for an ``Idempotency-Key``.

        Args:
            body: decoded JSON, by which a repeated call is told from another one.

        Raises:
            ApiError: it was not accepted.
        """
        once = once_of(request.headers.get("idempotency-key"), body)
        if self._replies.closing:
            raise ApiError(
                ErrorCode.UNAVAILABLE, "This server is shutting down; try again.", retry_after_seconds=1
            )
        span = ChatSpan("chat", chat.model, request.headers.get("traceparent"), stream=stream)
        try:
            with self._replies.accepting():
                admission = await self._intake.submit(
                    principal, chat, traceparent=span.traceparent, once=once
                )
        except ApiError as error:
            span.end(error.code.value, error.code.value if error.status >= 500 else None)
            raise
        except BaseException as error:
            span.end("error", type(error).__name__)
            raise
        request_id = admission.request_id
        span.name_request(request_id)
        name_request(request.scope, request_id)
        note_rate_limits(request.scope, admission.rate_limits)
        accepted = Accepted(
            tenant=principal.tenant,
            tier=principal.tier,
            model=chat.model,
            created_ms=created_ms_of(request_id),
        )
        return Submitted(reply_facts(self._live.current, request_id, accepted), span)
