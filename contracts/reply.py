"""A reply as its token stream tells it: the fold that every reader of a whole stream shares.

The gateway folds a stream into a response, a worker that takes over folds it into the state to continue
from, history folds it into a conversation turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .continuity import joins
from .entries import Accepted, Dispatched, Moderated, Started, StreamEntry, Terminal, Text
from .errors import ErrorCode, error_body
from .records import OutcomeChoice, Usage
from .stream_ids import START, StreamId
from .tiers import Status

_GAP = Terminal(
    status=Status.FAILED,
    error=error_body(ErrorCode.STREAM_LOST, "A part of the reply's token stream was lost."),
)


@dataclass
class ChoiceState:
    """What is out of one choice so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Reply:
    """State of a token stream after the entries applied so far.

    Attributes:
        gap: the first entry that does not join what was before it (:mod:`contracts.continuity`). Text from
            there on is left out, and a reply that ends as completed has failed: a text with a hole in it
            is nobody's answer.
    """

    last_id: StreamId = START
    accepted: Accepted | None = None
    prompt_tokens: int | None = None
    attempts: int = 0
    tokens_out: int = 0
    choices: dict[int, ChoiceState] = field(default_factory=dict)
    terminal: Terminal | None = None
    gap: StreamId | None = None

    def apply(self, item: StreamEntry) -> None:
        """Add one entry; entries at or before the last one are ignored (a repeat is harmless)."""
        if item.id <= self.last_id:
            return
        self.last_id = item.id
        if self.gap is None and not joins(self.tokens_out, item):
            self.gap = item.id
        match item.entry:
            case Accepted() as accepted:
                self.accepted = accepted
            case Moderated(prompt_tokens=count):
                self.prompt_tokens = count
            case Dispatched(prompt_tokens=int(count)):
                self.prompt_tokens = count
            case Started():
                self.attempts = item.id.attempt
            case Text() as text if self.gap is None:
                self.tokens_out = item.id.token
                choice = self.choices.setdefault(text.index, ChoiceState())
                choice.text += text.text
                choice.token_ids.extend(text.token_ids)
                choice.logprobs.extend(text.logprobs or ())
            case Terminal() as terminal:
                lost = self.gap is not None and terminal.status is Status.COMPLETED
                self.terminal = _GAP if lost else terminal
            case _:
                pass

    def extend(self, items: Iterable[StreamEntry]) -> Reply:
        """Apply several entries; returns itself."""
        for item in items:
            self.apply(item)
        return self

    @property
    def usage(self) -> Usage:
        """The usage the seal states, else what the stream shows was produced."""
        if self.terminal is not None and self.terminal.usage is not None:
            return self.terminal.usage
        return Usage(prompt_tokens=self.prompt_tokens or 0, completion_tokens=self.tokens_out)

    @property
    def text(self) -> str:
        """What is out of the first choice."""
        return self.choices[0].text if 0 in self.choices else ""

    def outcome_choices(self) -> list[OutcomeChoice]:
        """The choices as an outcome record holds them."""
        reasons = self.terminal.finish_reasons if self.terminal else []
        indices = sorted({*self.choices, *range(len(reasons))})
        return [
            OutcomeChoice(
                index=i,
                text=self.choices[i].text if i in self.choices else "",
                finish_reason=reasons[i] if i < len(reasons) else None,
            )
            for i in indices
        ]
