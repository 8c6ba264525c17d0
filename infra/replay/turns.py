"""What is written of a request that ended, and of the conversation that it is part of. Pure.

A conversation is one JSON object::

    {"id", "tenant", "turns": [{"request_id", "model", "tier", "created_ms", "finished_ms", "status",
     "error_code", "messages", "choices": [{"index", "text", "finish_reason"}], "usage", "ttft_ms",
     "duration_ms"}]}

A request that named no conversation is one of its own, under its request id; its messages hold what was said
before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from contracts.entries import Accepted
from contracts.identity import conversation_key
from contracts.records import OutcomeRecord

_LETTER: Final = re.compile(r"[^\W\d_]")
_DIGIT: Final = re.compile(r"\d")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which requests are taken from the log; None = all.

    Attributes:
        since_ms / until_ms: acceptance, Unix milliseconds; from ``since_ms``, before ``until_ms``.
        offsets: which records are read: first and last of each partition named; empty = all, and None as the
            last one = to the end.
    """

    tenant: str | None = None
    conversation: str | None = None
    model: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    offsets: Mapping[int, tuple[int, int | None]] = field(default_factory=dict)

    def takes(self, outcome: OutcomeRecord) -> bool:
        """Whether the request of a record that was read is wanted."""
        return self.takes_request(outcome.request_id, outcome)

    def takes_request(self, request_id: str, facts: OutcomeRecord | Accepted) -> bool:
        """Whether a request is wanted."""
        return (
            self.tenant in (None, facts.tenant)
            and self.conversation in (None, facts.conversation_id or request_id)
            and self.model in (None, facts.model)
            and (self.since_ms is None or facts.created_ms >= self.since_ms)
            and (self.until_ms is None or facts.created_ms < self.until_ms)
        )


def conversation_of(outcome: OutcomeRecord) -> str:
    """The conversation that a request is part of, or its own id."""
    return outcome.conversation_id or outcome.request_id


def turn_object(outcome: OutcomeRecord) -> dict[str, Any]:
    """A request as a turn of its conversation."""
    return {
        "request_id": outcome.request_id,
        "model": outcome.model,
        "tier": outcome.tier,
        "created_ms": outcome.created_ms,
        "finished_ms": outcome.finished_ms,
        "status": outcome.status.value,
        "error_code": outcome.error.code if outcome.error is not None else None,
        "messages": [message.model_dump(exclude_none=True) for message in outcome.turn],
        "choices": [choice.model_dump(mode="json") for choice in outcome.choices],
        "usage": outcome.usage.model_dump(),
        "ttft_ms": outcome.ttft_ms,
        "duration_ms": outcome.duration_ms,
    }


def conversation_object(
    conversation: str, tenant: str, turns: Iterable[dict[str, Any]], *, redact: bool = False
) -> dict[str, Any]:
    """A conversation.

    Args:
        redact: keep the shape, not the words: every letter becomes ``x`` and every digit ``0``; names of
            users and of conversations become digests, which are the same for the same name.
    """
    shown = list(turns)
    if not redact:
        return {"id": conversation, "tenant": tenant, "turns": shown}
    return {
        "id": conversation_key(tenant, conversation),
        "tenant": conversation_key("", tenant),
        "turns": [_redacted(turn) for turn in shown],
    }


def masked(text: str) -> str:
    """Text without its letters and digits, as long as it was."""
    return _DIGIT.sub("0", _LETTER.sub("x", text))


def _redacted(turn: dict[str, Any]) -> dict[str, Any]:
    return {
        **turn,
        "messages": [
            {key: masked(value) if key != "role" else value for key, value in message.items()}
            for message in turn["messages"]
        ],
        "choices": [{**choice, "text": masked(choice["text"])} for choice in turn["choices"]],
    }
