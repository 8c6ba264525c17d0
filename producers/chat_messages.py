"""The ``messages`` of a chat completion body: text turns, checked one by one.

Decided here: empty text is valid for every role; a conversation of system messages only is valid; the text
parts of one message are joined by a newline. Images, audio, files and tools are refused by name.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, Literal, cast

from contracts.records import Message

from .refusals import invalid, unsupported

MAX_MESSAGES: Final = 2_000
MAX_PARTS: Final = 2_000
MAX_NAME_CHARACTERS: Final = 64

_ROLES: Final = ("system", "developer", "user", "assistant")
_TOOL_FIELDS: Final = ("tool_calls", "function_call", "tool_call_id")

_PART_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
#: What :func:`parse_messages` takes, for the OpenAPI document.
MESSAGES_SCHEMA: Final[dict[str, Any]] = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": list(_ROLES)},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "minItems": 1, "maxItems": MAX_PARTS, "items": _PART_SCHEMA},
                ]
            },
            "name": {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_NAME_CHARACTERS},
            **{field: {"enum": [None, []], "description": "Not supported."} for field in _TOOL_FIELDS},
            "audio": {"type": "null", "description": "Not supported."},
        },
    },
}


def is_unicode(text: str) -> bool:
    """Whether ``text`` can be written as UTF-8, which a lone surrogate cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_messages(raw: object) -> list[Message]:
    """Validate ``messages``.

    Raises:
        ApiError: 400 that names the message or the part of it.
    """
    if not isinstance(raw, list):
        raise invalid("messages", "must be a list of messages.")
    if not 1 <= len(raw) <= MAX_MESSAGES:
        raise invalid("messages", f"must hold 1 to {MAX_MESSAGES} messages.")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(raw)]


def _message(raw: object, where: str) -> Message:
    if not isinstance(raw, dict):
        raise invalid(where, "must be an object.")
    role = raw.get("role")
    if role in ("tool", "function"):
        raise unsupported(f"{where}.role", "tool results are")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(_ROLES)}.")
    for field in _TOOL_FIELDS:
        if raw.get(field) not in (None, []):
            raise unsupported(f"{where}.{field}", "tool calls are")
    if raw.get("audio") is not None:
        raise unsupported(f"{where}.audio", "audio is")
    return Message(
        role=cast(Literal["system", "developer", "user", "assistant"], role),
        content=parse_text(raw.get("content"), f"{where}.content"),
        name=_name(raw.get("name"), f"{where}.name"),
    )


def parse_text(raw: object, where: str, part_types: Collection[str] = ("text",)) -> str:
    """Text, or a list of parts with texts of these types, which are joined by newlines.

    Raises:
        ApiError: 400 that names the part.
    """
    if isinstance(raw, list):
        if not 1 <= len(raw) <= MAX_PARTS:
            raise invalid(where, f"must hold 1 to {MAX_PARTS} parts.")
        return "\n".join([_part(part, f"{where}[{i}]", part_types) for i, part in enumerate(raw)])
    if not isinstance(raw, str):
        raise invalid(where, "must be a string or a list of text parts.")
    return _text(raw, where)


def _part(raw: Any, where: str, part_types: Collection[str]) -> str:
    if not isinstance(raw, dict) or not isinstance(raw.get("type"), str):
        raise invalid(where, "must be an object with a type.")
    if raw["type"] not in part_types:
        raise unsupported(where, "parts other than text are")
    if not isinstance(raw.get("text"), str):
        raise invalid(f"{where}.text", "must be a string.")
    return _text(raw["text"], f"{where}.text")


def _name(raw: object, where: str) -> str | None:
    if raw is None:
        return None
    if not isinstance(raw, str) or not 1 <= len(raw) <= MAX_NAME_CHARACTERS:
        raise invalid(where, f"must be a string of 1 to {MAX_NAME_CHARACTERS} characters.")
    return _text(raw, where)


def _text(text: str, where: str) -> str:
    if not is_unicode(text):
        raise invalid(where, "must be Unicode text, without lone surrogates.")
    return text
