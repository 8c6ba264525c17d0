"""The chat endpoints: create, read (again), cancel.

Decided here: ``GET /v1/chat/completions/{id}`` without ``stream=true`` answers as a call that does not
stream, with the completion once it is complete, waiting for it where it still runs. A cancelled request
answers 499 in the error shape.
"""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from contracts.entries import Terminal
from contracts.errors import ApiError, ErrorCode
from contracts.stream_ids import MAX_PART, START, StreamId
from infra.live_settings import LiveSettings
from streaming_edge.offsets import begun_choices, check_offset, parse_offset
from streaming_edge.protocols import Door, StreamStore
from streaming_edge.sse import ChatChunkEncoder

from .api_document import ADMISSION_ERRORS, MODEL_ERRORS, REPLY_ERRORS, describe
from .api_parameters import AFTER, IDEMPOTENCY_KEY, INCLUDE_USAGE, LAST_EVENT_ID, STREAM
from .api_shapes import ChatCompletion, ChatCompletionChunk, RequestStatus
from .chat_request import chat_body_schema, parse_chat_request
from .chat_span import ChatSpan
from .http_auth import authenticate
from .http_body import read_json
from .http_errors import JsonResponse
from .http_scope import name_request
from .limit_headers import RATE_LIMIT_HEADERS
from .protocols import ChatIntake
from .query_flags import query_flag
from .reply_reading import ReplyReading, accepted_entry
from .reply_responses import DEGRADED_HEADER, EventStreamReply, ReplyServices, WholeReply
from .request_times import reply_facts
from .stored_shapes import StoredChatCompletion
from .submitting import Submitting

_BEFORE_SEAL: Final = StreamId(MAX_PART, MAX_PART - 1)
_TAG: Final = "Chat"
_DEGRADED: Final = {
    DEGRADED_HEADER: "The step of the overload ladder that made the reply less than asked for."
}


def make_chat_router(
    live: LiveSettings,
    door: Door,
    intake: ChatIntake,
    streams: StreamStore,
    services: ReplyServices,
    reading: ReplyReading,
    submitting: Submitting,
) -> APIRouter:
    """The routes under ``/v1/chat/completions``."""
    router = APIRouter(prefix="/v1/chat/completions", redirect_slashes=False)

    @router.post(
        "",
        **describe(
            "Create a chat completion",
            tag=_TAG,
            body=chat_body_schema(),
            success=ChatCompletion,
            events=ChatCompletionChunk,
            moved=True,
            headers=_DEGRADED | RATE_LIMIT_HEADERS,
            parameters=(IDEMPOTENCY_KEY,),
            errors=(*MODEL_ERRORS, *ADMISSION_ERRORS, *REPLY_ERRORS),
        ),
    )
    async def create(request: Request) -> Response:
        principal = authenticate(request, door)
        body = await read_json(request, live.current.http.max_body_bytes)
        chat = parse_chat_request(body, live.current, principal)
        made = await submitting.submit(principal, request, chat, body, stream=chat.stream)
        facts, span = made.facts, made.span
        if not chat.stream:
            return WholeReply(services, facts, span)
        encoder = ChatChunkEncoder(
            facts.request_id, chat.model, facts.created_ms // 1000, chat.include_usage
        )
        return EventStreamReply(services, facts, span, encoder, include_usage=chat.include_usage)

    @router.get(
        "/{request_id}",
        **describe(
            "Read a reply again, or on after an offset",
            tag=_TAG,
            success=ChatCompletion | StoredChatCompletion,
            events=ChatCompletionChunk,
            moved=True,
            headers=_DEGRADED,
            parameters=(STREAM, INCLUDE_USAGE, AFTER, LAST_EVENT_ID),
            errors=(
                *REPLY_ERRORS,
                ErrorCode.NOT_FOUND,
                ErrorCode.INVALID_VALUE,
                ErrorCode.INVALID_OFFSET,
                ErrorCode.OFFSET_AHEAD,
            ),
        ),
    )
    async def read(request: Request, request_id: str) -> Response:
        principal = authenticate(request, door)
        stream = query_flag(request, "stream")
        include_usage = query_flag(request, "include_usage")
        offset = _offset(request)
        if not stream:
            if offset is not None:
                parse_offset(offset)
            return await reading.whole(principal, request, request_id)
        await intake.authorize(principal, request_id)
        name_request(request.scope, request_id)
        accepted = await accepted_entry(streams, request_id)
        facts = reply_facts(live.current, request_id, accepted)
        after, begun = START, None
        if offset is not None:
            after = await check_offset(streams, request_id, offset)
            if accepted.choices > 1:
                begun = await begun_choices(streams, request_id, after)
        span = ChatSpan("resume", facts.model, accepted.traceparent, stream=True)
        span.name_request(request_id)
        encoder = ChatChunkEncoder(
            request_id, facts.model, facts.created_ms // 1000, include_usage, after, begun
        )
        return EventStreamReply(services, facts, span, encoder, after, include_usage=include_usage)

    @router.post(
        "/{request_id}/cancel",
        **describe(
            "End a request, wherever it is",
            tag=_TAG,
            success=RequestStatus,
            errors=(ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE),
        ),
    )
    async def cancel(request: Request, request_id: str) -> Response:
        principal = authenticate(request, door)
        await intake.cancel(principal, request_id)
        name_request(request.scope, request_id)
        last = await streams.read(request_id, _BEFORE_SEAL, 1)
        status = last[0].entry.status.value if last and isinstance(last[0].entry, Terminal) else None
        return JsonResponse({"id": request_id, "object": "chat.completion.status", "status": status})

    return router


def _offset(request: Request) -> str | None:
    """The offset to resume after, from ``Last-Event-ID`` or ``after``."""
    header = request.headers.get("last-event-id")
    query = request.query_params.get("after")
    if header is not None and query is not None and header != query:
        raise ApiError(
            ErrorCode.INVALID_OFFSET,
            "'Last-Event-ID' and 'after' name different offsets.",
            param="after",
        )
    return header if header is not None else query
