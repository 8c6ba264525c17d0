"""``/v1/responses``: create, read, resume, cancel, delete.

Decided here: a call that is not in the background answers what went wrong before its first token as an
error, as chat completions do; reading a response that has failed shows it, failed. Without ``store`` nothing
can be read again.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from contracts.errors import ErrorCode
from infra.live_settings import LiveSettings
from infra.stored_replies_redis import StoredReplies
from infra.stream_redis import RedisTokenStreams
from streaming_edge.protocols import Door

from .api_document import ADMISSION_ERRORS, MODEL_ERRORS, REPLY_ERRORS, describe
from .api_parameters import IDEMPOTENCY_KEY, STREAM, Parameter
from .chat_span import ChatSpan
from .conversation_desk import ConversationDesk
from .conversation_shapes import MessageItemList
from .http_auth import authenticate
from .http_body import read_json
from .http_errors import JsonResponse
from .http_scope import name_request
from .intake import PipelineIntake
from .limit_headers import RATE_LIMIT_HEADERS
from .paging import AFTER_ID, cut_page, is_ascending, limit_parameter, order_parameter, page_limit
from .query_flags import query_flag
from .refusals import invalid
from .reply_reading import accepted_entry
from .reply_responses import ReplyServices
from .request_times import reply_facts
from .responses.body import ResponseCall, parse_response_body, response_body_schema
from .responses.events import NOTHING_SEEN, ResponseEvents
from .responses.ids import response_id_of
from .responses.objects import (
    ResponseDeleted,
    ResponseEvent,
    ResponseFacts,
    ResponseObject,
    running_response,
)
from .responses.reading import ResponseReading
from .responses.replies import ResponseEventStream, WholeResponse
from .submitting import Submitted, Submitting

_TAG: Final = "Responses"
_MOST: Final = 100
_DEFAULT: Final = 20
_WAIT: Final = Parameter(
    "wait", "query", "Answer when it has ended.", {"type": "boolean", "default": False}
)
_STARTING_AFTER: Final = Parameter(
    "starting_after",
    "query",
    "With stream=true: only the events after the one with this sequence_number.",
    {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
)
_FOUND: Final = (ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE)


def make_responses_router(
    live: LiveSettings,
    door: Door,
    intake: PipelineIntake,
    streams: RedisTokenStreams,
    services: ReplyServices,
    submitting: Submitting,
    reading: ResponseReading,
    kept: StoredReplies,
    conversations: ConversationDesk,
) -> APIRouter:
    """The routes under ``/v1/responses``."""
    router = APIRouter(prefix="/v1/responses", redirect_slashes=False)
    one: dict[str, Any] = {"tag": _TAG, "success": ResponseObject}

    def answer(call: ResponseCall, made: Submitted) -> Response:
        facts = ResponseFacts(
            request_id=made.facts.request_id,
            created=made.facts.created_ms // 1000,
            model=call.chat.model,
            keep=call.keep,
            conversation_id=call.conversation_id,
            messages=call.chat.messages,
            stored=call.chat.keep is not None,
        )
        direct = not call.background
        if call.stream:
            events = ResponseEvents(facts)
            return ResponseEventStream(services, made.facts, made.span, events, direct=direct)
        if direct:
            return WholeResponse(services, made.facts, made.span, facts, direct=True)
        made.span.end("accepted")
        return JsonResponse(running_response(facts, "queued"))

    @router.post(
        "",
        **describe(
            "Create a response",
            **one,
            body=response_body_schema(),
            events=ResponseEvent,
            moved=True,
            headers=RATE_LIMIT_HEADERS,
            parameters=(IDEMPOTENCY_KEY,),
            errors=(ErrorCode.NOT_FOUND, *MODEL_ERRORS, *ADMISSION_ERRORS, *REPLY_ERRORS),
        ),
    )
    async def create(request: Request) -> Response:
        principal = authenticate(request, door)
        body = await read_json(request, live.current.http.max_body_bytes)
        call = parse_response_body(body, live.current, principal)
        if call.conversation_id is not None:
            await conversations.get(principal, call.conversation_id)
        earlier = await reading.earlier(principal, call.previous_response_id)
        chat = call.request(earlier)
        made = await submitting.submit(principal, request, chat, body, stream=call.stream)
        return answer(call, made)

    @router.get(
        "/{response_id}",
        **describe(
            "Read a response, or its events after one that was seen",
            **one,
            events=ResponseEvent,
            moved=True,
            parameters=(STREAM, _STARTING_AFTER, _WAIT),
            errors=(*REPLY_ERRORS, ErrorCode.NOT_FOUND, ErrorCode.INVALID_VALUE),
        ),
    )
    async def read(request: Request, response_id: str) -> Response:
        principal = authenticate(request, door)
        stream, wait = query_flag(request, "stream"), query_flag(request, "wait")
        seen = _starting_after(request)
        reply = await reading.find(principal, response_id)
        name_request(request.scope, reply.id)
        if not stream and (not wait or reply.status is not None):
            return JsonResponse(await reading.now(reply))
        accepted = await accepted_entry(streams, reply.id)
        times = reply_facts(live.current, reply.id, accepted)
        span = ChatSpan("resume", times.model, accepted.traceparent, stream=stream)
        span.name_request(reply.id)
        facts = ResponseFacts.of_stored(reply)
        if not stream:
            return WholeResponse(services, times, span, facts, direct=False)
        return ResponseEventStream(services, times, span, ResponseEvents(facts, seen), direct=False)

    @router.get(
        "/{response_id}/input_items",
        **describe(
            "The input of a response",
            tag=_TAG,
            success=MessageItemList,
            parameters=(AFTER_ID, limit_parameter(_MOST, _DEFAULT), order_parameter()),
            errors=(*_FOUND, ErrorCode.INVALID_VALUE),
        ),
    )
    async def input_items(request: Request, response_id: str) -> Response:
        principal = authenticate(request, door)
        query = request.query_params
        limit, ascending = page_limit(query, _MOST, _DEFAULT), is_ascending(query)
        items = ResponseFacts.of_stored(await reading.find(principal, response_id)).input_items()
        return JsonResponse(cut_page(items, query.get("after"), limit, ascending=ascending))

    @router.post(
        "/{response_id}/cancel",
        **describe("End a background response", **one, errors=(*_FOUND, ErrorCode.INVALID_VALUE)),
    )
    async def cancel(request: Request, response_id: str) -> Response:
        principal = authenticate(request, door)
        reply = await reading.find(principal, response_id)
        if not ResponseFacts.of_stored(reply).background:
            raise invalid("response_id", "only background responses can be cancelled.")
        name_request(request.scope, reply.id)
        if reply.status is None:
            await intake.cancel(principal, reply.id)
        return JsonResponse(await reading.now(reply))

    @router.delete(
        "/{response_id}",
        **describe("Delete a response", tag=_TAG, success=ResponseDeleted, errors=_FOUND),
    )
    async def delete(request: Request, response_id: str) -> Response:
        principal = authenticate(request, door)
        reply = await reading.find(principal, response_id)
        if reply.status is None:
            await intake.cancel(principal, reply.id)
        # First what leads to the stream: a failure in between leaves a response that can be deleted again.
        await streams.disown(reply.id)
        await kept.delete(principal.tenant, reply.id)
        return JsonResponse({"id": response_id_of(reply.id), "object": "response", "deleted": True})

    return router


def _starting_after(request: Request) -> int:
    raw = request.query_params.get("starting_after")
    if raw is None:
        return NOTHING_SEEN
    if not (raw.isascii() and raw.isdecimal() and len(raw) <= 10 and int(raw) < 2**31):
        raise invalid("starting_after", "must be the sequence_number of an event.")
    return int(raw)
