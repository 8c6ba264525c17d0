"""Messages as items of the Responses and Conversations APIs: read from bodies, shown in answers. Pure."""

from __future__ import annotations

from typing import Any, Final, Literal, cast

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from contracts.conversation import Item
from contracts.records import Message

from .chat_messages import MAX_PARTS, parse_text
from .refusals import invalid, unsupported

Role = Literal["user", "assistant", "system", "developer"]

_CLOSED = ConfigDict(extra="forbid")
_ROLES: Final = ("user", "assistant", "system", "developer")
_PART_TYPES: Final = ("input_text", "output_text", "text")

#: One item that :func:`parse_items` takes, for the OpenAPI document.
ITEM_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "type": {"enum": ["message", None]},
        "role": {"enum": list(_ROLES)},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MAX_PARTS,
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {
                            "type": {"type": "string", "enum": list(_PART_TYPES)},
                            "text": {"type": "string"},
                        },
                    },
                },
            ]
        },
    },
}


@with_config(_CLOSED)
class InputTextPart(TypedDict):
    """Text that a caller brought."""

    type: Literal["input_text"]
    text: str


@with_config(_CLOSED)
class OutputTextPart(TypedDict):
    """Text that a model wrote, or that a caller says it wrote."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


@with_config(_CLOSED)
class MessageItem(TypedDict):
    """A message; ``incomplete`` where the reply was cancelled."""

    id: str
    type: Literal["message"]
    role: Role
    status: Literal["completed", "incomplete"]
    content: list[InputTextPart | OutputTextPart]


def parse_items(raw: object, where: str, most: int) -> list[Message]:
    """The messages of a list of items.

    Args:
        raw: decoded JSON.
        where: the field it stands in.
        most: how many there may be; at least one has to be.

    Raises:
        ApiError: 400 that names the item or the part of it.
    """
    if not isinstance(raw, list) or not 1 <= len(raw) <= most:
        raise invalid(where, f"must be a list of 1 to {most} items.")
    return [_message(item, f"{where}[{i}]") for i, item in enumerate(raw)]


def _message(raw: object, where: str) -> Message:
    if not isinstance(raw, dict):
        raise invalid(where, "must be an object.")
    if raw.get("type") not in (None, "message"):
        raise unsupported(f"{where}.type", "items other than messages are")
    role = raw.get("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(_ROLES)}.")
    return Message(
        role=cast(Role, role), content=parse_text(raw.get("content"), f"{where}.content", _PART_TYPES)
    )


def message_item(item: Item) -> MessageItem:
    """An item as the API shows it."""
    text = item.message.content
    part: InputTextPart | OutputTextPart = {"type": "input_text", "text": text}
    if item.message.role == "assistant":
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": item.id,
        "type": "message",
        "role": item.message.role,
        "status": "completed" if item.complete else "incomplete",
        "content": [part],
    }
