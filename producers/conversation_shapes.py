"""Conversations as the API takes and shows them. Pure."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from contracts.conversation import ConversationFacts
from contracts.errors import ApiError, ErrorCode
from contracts.records import Message

from .message_items import ITEM_SCHEMA, MessageItem, parse_items
from .stored_shapes import parse_metadata_body

#: Items that one call adds.
MAX_ITEMS: Final = 20
_CLOSED = ConfigDict(extra="forbid")
CONVERSATION_ID_PATTERN: Final = r"conv_[0-9a-f]{32}"
_CONVERSATION_ID: Final = re.compile(CONVERSATION_ID_PATTERN, re.ASCII)
_ITEMS: Final = {"type": "array", "minItems": 1, "maxItems": MAX_ITEMS, "items": ITEM_SCHEMA}
_METADATA: Final = {
    "type": ["object", "null"],
    "maxProperties": 16,
    "propertyNames": {"maxLength": 64},
    "additionalProperties": {"type": "string", "maxLength": 512},
}
CREATE_SCHEMA: Final[dict[str, Any]] = {
    "title": "ConversationRequest",
    "type": "object",
    "properties": {"items": {"anyOf": [_ITEMS, {"enum": [None, []]}]}, "metadata": _METADATA},
}
ADD_SCHEMA: Final[dict[str, Any]] = {
    "title": "ConversationItemsRequest",
    "type": "object",
    "required": ["items"],
    "properties": {"items": _ITEMS},
}


@with_config(_CLOSED)
class ConversationObject(TypedDict):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


@with_config(_CLOSED)
class ConversationDeleted(TypedDict):
    """A conversation is gone, with its items."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


@with_config(_CLOSED)
class MessageItemList(TypedDict):
    """A page of items."""

    object: Literal["list"]
    data: list[MessageItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


def is_conversation_id(text: str) -> bool:
    """Whether ``text`` has the form of the ids that are given to conversations."""
    return _CONVERSATION_ID.fullmatch(text) is not None


def parse_creation(body: object) -> tuple[list[Message], dict[str, str]]:
    """The first messages and the metadata of a conversation to be made.

    Raises:
        ApiError: 400 that names the field.
    """
    if not isinstance(body, dict):
        raise ApiError(ErrorCode.INVALID_REQUEST, "The body must be a JSON object.")
    metadata = parse_metadata_body({"metadata": body.get("metadata")})
    raw = body.get("items")
    return (parse_items(raw, "items", MAX_ITEMS) if raw not in (None, []) else []), metadata


def parse_addition(body: object) -> list[Message]:
    """The messages to be added to a conversation.

    Raises:
        ApiError: 400 that names the field.
    """
    if not isinstance(body, dict):
        raise ApiError(ErrorCode.INVALID_REQUEST, "The body must be a JSON object.")
    return parse_items(body.get("items"), "items", MAX_ITEMS)


def conversation_object(conversation_id: str, facts: ConversationFacts) -> ConversationObject:
    """A conversation as the API shows it."""
    return {
        "id": conversation_id,
        "object": "conversation",
        "created_at": facts.created,
        "metadata": facts.metadata,
    }
