"""``/v1/conversations``: make, read, change and delete conversations and their items."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from contracts.errors import ErrorCode
from infra.live_settings import LiveSettings
from streaming_edge.protocols import Door

from .api_document import describe
from .conversation_desk import ConversationDesk, no_such_item
from .conversation_shapes import (
    ADD_SCHEMA,
    CREATE_SCHEMA,
    ConversationDeleted,
    ConversationObject,
    MessageItemList,
    conversation_object,
    parse_addition,
    parse_creation,
)
from .http_auth import authenticate
from .http_body import read_json
from .http_errors import JsonResponse
from .message_items import MessageItem, message_item
from .paging import (
    AFTER_ID,
    cut_page,
    is_ascending,
    limit_parameter,
    list_object,
    order_parameter,
    page_limit,
)
from .stored_shapes import MetadataBody, parse_metadata_body

_TAG: Final = "Conversations"
_MOST: Final = 100
_DEFAULT: Final = 20
_ERRORS: Final = (ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE)


def make_conversations_router(live: LiveSettings, door: Door, desk: ConversationDesk) -> APIRouter:
    """The routes under ``/v1/conversations``."""
    router = APIRouter(prefix="/v1/conversations", redirect_slashes=False)
    one: dict[str, Any] = {"tag": _TAG, "success": ConversationObject}

    async def body_of(request: Request) -> Any:
        return await read_json(request, live.current.http.max_body_bytes)

    @router.post(
        "",
        **describe(
            "Make a conversation",
            **one,
            body=CREATE_SCHEMA,
            errors=(ErrorCode.UNSUPPORTED, ErrorCode.UNAVAILABLE),
        ),
    )
    async def create(request: Request) -> Response:
        principal = authenticate(request, door)
        messages, metadata = parse_creation(await body_of(request))
        conversation_id, facts = await desk.create(principal, messages, metadata)
        return JsonResponse(conversation_object(conversation_id, facts))

    @router.get("/{conversation_id}", **describe("One conversation", **one, errors=_ERRORS))
    async def retrieve(request: Request, conversation_id: str) -> Response:
        facts = await desk.get(authenticate(request, door), conversation_id)
        return JsonResponse(conversation_object(conversation_id, facts))

    @router.post(
        "/{conversation_id}",
        **describe("Replace a conversation's metadata", **one, body=MetadataBody, errors=_ERRORS),
    )
    async def update(request: Request, conversation_id: str) -> Response:
        principal = authenticate(request, door)
        metadata = parse_metadata_body(await body_of(request))
        facts = await desk.set_metadata(principal, conversation_id, metadata)
        return JsonResponse(conversation_object(conversation_id, facts))

    @router.delete(
        "/{conversation_id}",
        **describe(
            "Delete a conversation with its items", tag=_TAG, success=ConversationDeleted, errors=_ERRORS
        ),
    )
    async def delete(request: Request, conversation_id: str) -> Response:
        await desk.delete(authenticate(request, door), conversation_id)
        gone = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
        return JsonResponse(gone)

    @router.get(
        "/{conversation_id}/items",
        **describe(
            "The items of a conversation",
            tag=_TAG,
            success=MessageItemList,
            parameters=(AFTER_ID, limit_parameter(_MOST, _DEFAULT), order_parameter()),
            errors=(*_ERRORS, ErrorCode.INVALID_VALUE),
        ),
    )
    async def list_items(request: Request, conversation_id: str) -> Response:
        principal = authenticate(request, door)
        query = request.query_params
        limit, ascending = page_limit(query, _MOST, _DEFAULT), is_ascending(query)
        items = [message_item(item) for item in await desk.items(principal, conversation_id)]
        return JsonResponse(cut_page(items, query.get("after"), limit, ascending=ascending))

    @router.post(
        "/{conversation_id}/items",
        **describe(
            "Add items to a conversation",
            tag=_TAG,
            body=ADD_SCHEMA,
            success=MessageItemList,
            errors=(*_ERRORS, ErrorCode.UNSUPPORTED),
        ),
    )
    async def add_items(request: Request, conversation_id: str) -> Response:
        principal = authenticate(request, door)
        messages = parse_addition(await body_of(request))
        items = await desk.add_items(principal, conversation_id, messages)
        return JsonResponse(list_object([message_item(item) for item in items], False))

    @router.get(
        "/{conversation_id}/items/{item_id}",
        **describe("One item of a conversation", tag=_TAG, success=MessageItem, errors=_ERRORS),
    )
    async def retrieve_item(request: Request, conversation_id: str, item_id: str) -> Response:
        items = await desk.items(authenticate(request, door), conversation_id)
        found = next((item for item in items if item.id == item_id), None)
        if found is None:
            raise no_such_item()
        return JsonResponse(message_item(found))

    @router.delete(
        "/{conversation_id}/items/{item_id}",
        **describe("Take an item out of a conversation", **one, errors=_ERRORS),
    )
    async def remove_item(request: Request, conversation_id: str, item_id: str) -> Response:
        principal = authenticate(request, door)
        facts = await desk.remove_item(principal, conversation_id, item_id)
        return JsonResponse(conversation_object(conversation_id, facts))

    return router
