"""Conversations to replay: exports, and chat logs in the OpenAI and ShareGPT styles. Pure.

A conversation is cut into turns at the assistant's replies. Where a log has no times, all is at 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from contracts.tiers import Status

#: Who spoke, in the ShareGPT style.
_SHAREGPT: Final = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
}
_ROLES: Final = ("system", "developer", "user", "assistant")

Message = dict[str, str]


@dataclass(frozen=True)
class RecordedTurn:
    """A request as it was, and what was answered.

    Attributes:
        added: messages that it brought.
        reply: None where there was none.
        at_ms: acceptance, Unix milliseconds; 0 where that is not known.
        status: of the outcome.
        request_id / error_code / finish_reason: None where there was none, or it is not known.
        prompt_tokens / output_tokens / ttft_ms / duration_ms: None where they are not known.
    """

    added: list[Message]
    reply: str | None
    at_ms: int = 0
    request_id: str | None = None
    status: str = "completed"
    error_code: str | None = None
    finish_reason: str | None = None
    model: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    ttft_ms: int | None = None
    duration_ms: int | None = None


@dataclass(frozen=True)
class RecordedConversation:
    """Turns in their order."""

    id: str
    turns: list[RecordedTurn]


@dataclass
class Reading:
    """What was found in a file.

    Attributes:
        unreadable: entries that are no conversation, a cut-off last line included.
    """

    conversations: list[RecordedConversation] = field(default_factory=list)
    unreadable: int = 0


def read_conversations(lines: Iterable[str]) -> Reading:
    """The conversations of JSON lines, or of one JSON array over all lines."""
    found = Reading()
    names: set[tuple[object, str]] = set()
    for number, raw in enumerate(json_values(lines), 1):
        conversation = recorded_conversation(raw, f"conversation {number}")
        if conversation is None:
            found.unreadable += 1
            continue
        # An export that was written twice holds each once; tenants may have chosen the same name.
        name = (str(raw.get("tenant")) if isinstance(raw, dict) else None, conversation.id)
        if name not in names:
            names.add(name)
            found.conversations.append(conversation)
    return found


def json_values(lines: Iterable[str]) -> Iterator[object]:
    """The JSON values of JSON lines, or of one JSON array over all lines; None for what is none."""
    rest = iter(lines)
    first = next((line for line in rest if line.strip()), "")
    if first.lstrip("\ufeff \t").startswith("["):
        try:
            array = json.loads(first.lstrip("\ufeff") + "".join(rest))
        except ValueError:
            array = [None]
        yield from array
        return
    for line in (first.lstrip("\ufeff"), *rest):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError:
                yield None


def recorded_conversation(raw: object, name: str) -> RecordedConversation | None:
    """A conversation in any of the styles, or None; ``name`` is its id where it has none."""
    if not isinstance(raw, dict):
        return None
    try:
        if isinstance(raw.get("turns"), list):
            turns = [recorded_turn(turn) for turn in raw["turns"]]
        elif isinstance(raw.get("messages"), list):
            turns = _cut([_message(m["role"], m["content"]) for m in raw["messages"]])
        elif isinstance(raw.get("conversations"), list):
            said = raw["conversations"]
            turns = _cut([_message(_SHAREGPT[m["from"]], m["value"]) for m in said])
        else:
            return None
    except (KeyError, TypeError, ValueError):
        return None
    named = raw.get("id")
    return RecordedConversation(named if isinstance(named, str) else name, turns) if turns else None


def _message(role: object, content: object) -> Message:
    if role not in _ROLES:
        raise ValueError("role")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise TypeError("content")
    return {"role": str(role), "content": content}


def _cut(messages: list[Message]) -> list[RecordedTurn]:
    turns: list[RecordedTurn] = []
    added: list[Message] = []
    for message in messages:
        if message["role"] == "assistant" and added:
            turns.append(RecordedTurn(added, message["content"]))
            added = []
        else:
            added.append(message)
    return [*turns, RecordedTurn(added, None)] if added and added[-1]["role"] == "user" else turns


def recorded_turn(turn: dict[str, Any]) -> RecordedTurn:
    """A turn as :func:`infra.replay.turns.turn_object` writes it.

    Raises:
        KeyError: it is none; so do ``TypeError`` and ``ValueError``.
    """
    first = next((c for c in turn["choices"] if c["index"] == 0), None)
    return RecordedTurn(
        added=[_message(m["role"], m["content"]) for m in turn["messages"]],
        reply=str(first["text"]) if first is not None else None,
        at_ms=int(turn["created_ms"]),
        request_id=str(turn["request_id"]),
        status=Status(turn["status"]).value,
        error_code=turn.get("error_code"),
        finish_reason=first.get("finish_reason") if first is not None else None,
        model=turn.get("model"),
        prompt_tokens=_count(turn["usage"]["prompt_tokens"]),
        output_tokens=_count(turn["usage"]["completion_tokens"]),
        ttft_ms=_count(turn.get("ttft_ms")),
        duration_ms=_count(turn.get("duration_ms")),
    )


def _count(raw: object) -> int | None:
    return raw if type(raw) is int and raw >= 0 else None
