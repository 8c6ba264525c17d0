"""Requests and outcomes that ask to be kept, for the tests of what keeps them."""

from __future__ import annotations

from typing import Any

from contracts.identity import make_request_id
from contracts.keep import Keep
from contracts.records import Message, OutcomeChoice, OutcomeRecord, Usage
from contracts.tiers import FinishReason, Status

BEGAN_MS = 1_900_000_000_000


def kept_outcome(number: int = 0, **changes: Any) -> OutcomeRecord:
    """The outcome of a kept completion; ``number`` orders them by time."""
    metadata = changes.pop("metadata", {"n": str(number)})
    facts: dict[str, Any] = {
        "request_id": make_request_id(BEGAN_MS + number, bytes(10)),
        "tenant": "t1",
        "key_id": "k1",
        "tier": "paid",
        "model": "m",
        "created_ms": BEGAN_MS + number,
        "finished_ms": BEGAN_MS + number + 2_000,
        "turn": [Message(role="user", content="Hi")],
        "status": Status.COMPLETED,
        "choices": [OutcomeChoice(index=0, text="Hello", finish_reason=FinishReason.STOP)],
        "usage": Usage(prompt_tokens=3, completion_tokens=1),
        "keep": Keep(kind="chat.completion", metadata=metadata, params={"temperature": 0.5}),
    }
    return OutcomeRecord(**{**facts, **changes})
