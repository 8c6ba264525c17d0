"""Kept chat completions (``store: true``): list, change their metadata, read their messages, delete."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from contracts.errors import ErrorCode
from contracts.identity import REQUEST_ID_PATTERN, is_request_id
from infra.live_settings import LiveSettings
from infra.stored_replies_redis import StoredReplies
from infra.stream_redis import RedisTokenStreams
from streaming_edge.protocols import Door

from .api_document import REPLY_ERRORS, describe
from .api_parameters import Parameter
from .http_auth import authenticate
from .http_body import read_json
from .http_errors import JsonResponse
from .paging import (
    AFTER_ID,
    cut_page,
    is_ascending,
    limit_parameter,
    list_object,
    order_parameter,
    page_limit,
)
from .refusals import invalid
from .reply_reading import KIND, ReplyReading
from .stored_shapes import (
    ChatCompletionDeleted,
    MetadataBody,
    StoredChatCompletion,
    StoredChatCompletionList,
    StoredMessageList,
    metadata_filter,
    parse_metadata_body,
    stored_completion,
    stored_messages,
)

_TAG: Final = "Stored chat completions"
_MOST: Final = 100
_DEFAULT: Final = 20
_AFTER: Final = replace(AFTER_ID, schema={"type": "string", "pattern": f"^{REQUEST_ID_PATTERN}$"})
_LIMIT: Final = limit_parameter(_MOST, _DEFAULT)
_MODEL: Final = Parameter("model", "query", "Only of the model with this name.", {"type": "string"})
_METADATA: Final = Parameter(
    "metadata",
    "query",
    "Only with at least these pairs, each as metadata[key]=value.",
    {
        "type": "object",
        "additionalProperties": {"type": "string", "maxLength": 512},
        "maxProperties": 16,
    },
    style="deepObject",
)


def make_stored_router(
    live: LiveSettings,
    door: Door,
    streams: RedisTokenStreams,
    reading: ReplyReading,
    kept: StoredReplies,
) -> APIRouter:
    """The routes under ``/v1/chat/completions`` that are about kept ones."""
    router = APIRouter(prefix="/v1/chat/completions", redirect_slashes=False)

    @router.get(
        "",
        **describe(
            "The kept completions that have completed",
            tag=_TAG,
            success=StoredChatCompletionList,
            parameters=(_AFTER, _LIMIT, order_parameter("asc"), _MODEL, _METADATA),
            errors=(ErrorCode.INVALID_VALUE, ErrorCode.UNAVAILABLE),
        ),
    )
    async def list_kept(request: Request) -> Response:
        principal = authenticate(request, door)
        query = request.query_params
        after = query.get("after")
        if after is not None and not is_request_id(after):
            raise invalid("after", "must be the id of a chat completion.")
        page = await kept.page(
            principal.tenant,
            KIND,
            after=after,
            limit=page_limit(query, _MOST, _DEFAULT),
            ascending=is_ascending(query, "asc"),
            model=_canonical(live, query.get("model")),
            metadata=metadata_filter(query.multi_items()),
        )
        completions = [stored_completion(reply) for reply in page.replies]
        return JsonResponse(list_object(completions, page.has_more))

    @router.post(
        "/{request_id}",
        **describe(
            "Replace the metadata of a kept completion",
            tag=_TAG,
            body=MetadataBody,
            success=StoredChatCompletion,
            moved=True,
            errors=(*REPLY_ERRORS, ErrorCode.NOT_FOUND),
        ),
    )
    async def update(request: Request, request_id: str) -> Response:
        principal = authenticate(request, door)
        metadata = parse_metadata_body(await read_json(request, live.current.http.max_body_bytes))
        await reading.find(principal, request_id)
        await kept.set_metadata(principal.tenant, request_id, metadata)
        return await reading.whole(principal, request, request_id)

    @router.get(
        "/{request_id}/messages",
        **describe(
            "The messages that a kept completion answers",
            tag=_TAG,
            success=StoredMessageList,
            parameters=(AFTER_ID, _LIMIT, order_parameter("asc")),
            errors=(ErrorCode.NOT_FOUND, ErrorCode.INVALID_VALUE, ErrorCode.UNAVAILABLE),
        ),
    )
    async def messages(request: Request, request_id: str) -> Response:
        principal = authenticate(request, door)
        query = request.query_params
        limit, ascending = page_limit(query, _MOST, _DEFAULT), is_ascending(query, "asc")
        found = stored_messages(await reading.find(principal, request_id))
        return JsonResponse(cut_page(found, query.get("after"), limit, ascending=ascending))

    @router.delete(
        "/{request_id}",
        **describe(
            "Delete a kept completion",
            tag=_TAG,
            success=ChatCompletionDeleted,
            errors=(ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE),
        ),
    )
    async def delete(request: Request, request_id: str) -> Response:
        principal = authenticate(request, door)
        await reading.find(principal, request_id)
        # First what leads to the stream: a failure in between leaves a completion that can be deleted again.
        await streams.disown(request_id)
        await kept.delete(principal.tenant, request_id)
        return JsonResponse({"id": request_id, "object": "chat.completion.deleted", "deleted": True})

    return router


def _canonical(live: LiveSettings, model: str | None) -> str | None:
    """The name that replies of this model carry; an unknown one is looked for as it is."""
    found = live.current.resolve_model(model) if model else None
    return found[0] if found is not None else model
