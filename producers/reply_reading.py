"""A whole chat completion, from wherever it is: its token stream, or the store once that has expired."""

from __future__ import annotations

from typing import Final

from fastapi import Request
from starlette.responses import Response

from contracts.entries import Accepted, Terminal
from contracts.errors import ApiError, ErrorCode
from contracts.identity import Principal
from contracts.keep import ReplyKind
from contracts.stored_reply import StoredReply
from contracts.stream_ids import START
from infra.live_settings import LiveSettings
from streaming_edge.protocols import Intake, StreamStore
from streaming_edge.terminal import terminal_error

from .chat_span import ChatSpan
from .http_errors import JsonResponse, error_response
from .http_scope import name_request
from .protocols import KeptReplies
from .reply_responses import ReplyServices, WholeReply, degraded_header
from .request_times import reply_facts
from .stored_shapes import kept_fields, stored_completion

KIND: Final[ReplyKind] = "chat.completion"


class ReplyReading:
    """Answers with the whole completion of a request, waiting for it while it runs."""

    def __init__(
        self,
        live: LiveSettings,
        intake: Intake,
        streams: StreamStore,
        services: ReplyServices,
        kept: KeptReplies,
    ) -> None:
        self._live = live
        self._intake = intake
        self._streams = streams
        self._services = services
        self._kept = kept

    async def find(self, principal: Principal, request_id: str) -> StoredReply:
        """The caller's kept completion.

        Raises:
            ApiError: ``not_found``.
        """
        reply = await self._find(principal, request_id)
        if reply is None:
            raise ApiError(ErrorCode.NOT_FOUND, "There is no such stored completion.")
        return reply

    async def whole(self, principal: Principal, request: Request, request_id: str) -> Response:
        """The completion, or the error it ended with.

        Raises:
            ApiError: there is no such request, or its stream has expired and it was not kept.
        """
        kept = await self._find(principal, request_id)
        try:
            await self._intake.authorize(principal, request_id)
            accepted = await accepted_entry(self._streams, request_id)
        except ApiError as error:
            if error.code is not ErrorCode.STREAM_EXPIRED or kept is None or kept.status is None:
                raise
            name_request(request.scope, request_id)
            return _stored(kept, Terminal(status=kept.status, error=kept.error))
        name_request(request.scope, request_id)
        facts = reply_facts(self._live.current, request_id, accepted)
        span = ChatSpan("resume", facts.model, accepted.traceparent, stream=False)
        span.name_request(request_id)
        return WholeReply(self._services, facts, span, kept_fields(kept) if kept is not None else None)

    async def _find(self, principal: Principal, request_id: str) -> StoredReply | None:
        reply = await self._kept.get(principal.tenant, request_id)
        return reply if reply is not None and reply.kind == KIND else None


async def accepted_entry(streams: StreamStore, request_id: str) -> Accepted:
    """The ``0-1`` entry of a request.

    Raises:
        ApiError: ``stream_expired``.
    """
    first = await streams.read(request_id, START, 1)
    if not first or not isinstance(first[0].entry, Accepted):
        raise ApiError(ErrorCode.STREAM_EXPIRED, "The stream of this request has expired.")
    return first[0].entry


def _stored(reply: StoredReply, terminal: Terminal) -> Response:
    error = terminal_error(terminal)
    if error is not None:
        return error_response(error)
    return JsonResponse(stored_completion(reply), headers=degraded_header(reply.degraded))
