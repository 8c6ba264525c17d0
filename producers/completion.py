"""A whole reply as the OpenAI API's ``chat.completion`` object."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from contracts.entries import Started, StreamEntry
from contracts.reply import Reply
from streaming_edge.terminal import usage_object

from .request_times import ReplyFacts


class CompletionBuilder:
    """Folds a token stream from its start into a completion."""

    def __init__(self) -> None:
        self._revision: str | None = None
        self._reply = Reply()

    def extend(self, entries: Iterable[StreamEntry]) -> None:
        """Add entries in order."""
        for item in entries:
            if isinstance(item.entry, Started):
                self._revision = item.entry.model_revision
            self._reply.apply(item)

    def completion(self, facts: ReplyFacts) -> dict[str, Any]:
        """The ``chat.completion`` object of a stream whose terminal entry says completed."""
        choices = []
        for choice in self._reply.outcome_choices():
            state = self._reply.choices.get(choice.index)
            logprobs = state.logprobs if state is not None else []
            choices.append(
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "finish_reason": choice.finish_reason or "stop",
                    "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
                }
            )
        less = {"degraded": facts.degraded.model_dump()} if facts.degraded is not None else {}
        return {
            "id": facts.request_id,
            "object": "chat.completion",
            "created": facts.created_ms // 1000,
            "model": facts.model,
            "choices": choices,
            "usage": usage_object(self._reply.usage),
            "system_fingerprint": self._revision,
            **less,
        }
