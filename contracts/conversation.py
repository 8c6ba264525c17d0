"""Stored conversations: what a turn is, and which turns the next prompt is made of."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from .records import Message, OutcomeRecord
from .reply import Reply
from .tiers import Status

#: Statuses whose turns are part of the conversation. What failed, was refused or expired never was said.
_SAID = frozenset({Status.COMPLETED, Status.CANCELLED})


class Turn(BaseModel):
    """One request of a conversation and what was answered.

    Attributes:
        request_id: orders turns, because request ids order by the time of acceptance.
        messages: what the request added.
        reply: text of choice 0; partial where the turn was cancelled.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    request_id: str
    created_ms: int
    messages: list[Message]
    reply: str
    status: Status

    @property
    def counts(self) -> bool:
        """Whether later turns see this one.

        Completed turns do, and cancelled ones with the text that was out. A cancelled turn without text
        and every other turn are left out whole, question included, so that no error is ever an answer.
        """
        return self.status in _SAID and (self.status is Status.COMPLETED or bool(self.reply))


def turn_of(outcome: OutcomeRecord) -> Turn:
    """The turn that an outcome adds to its conversation."""
    return Turn(
        request_id=outcome.request_id,
        created_ms=outcome.created_ms,
        messages=outcome.turn,
        reply=next((c.text for c in outcome.choices if c.index == 0), ""),
        status=outcome.status,
    )


def turn_of_reply(request_id: str, messages: list[Message], reply: Reply) -> Turn | None:
    """The turn of a request whose outcome is not stored yet, from its own token stream.

    Args:
        messages: what the request adds, as kept for it at acceptance.
        reply: the fold of its whole stream.

    Returns:
        None while the stream is not sealed: the conversation is busy with it.
    """
    if reply.terminal is None:
        return None
    first = reply.choices.get(0)
    return Turn(
        request_id=request_id,
        created_ms=reply.accepted.created_ms if reply.accepted is not None else 0,
        messages=messages,
        reply=first.text if first is not None else "",
        status=reply.terminal.status,
    )


def context_messages(turns: Iterable[Turn], max_turns: int) -> list[Message]:
    """The messages that the next prompt of a conversation starts with: its last turns that count.

    Args:
        turns: in any order, each once or more often (a repeated request id counts once).
        max_turns: how many of the latest are used.
    """
    said = {turn.request_id: turn for turn in turns if turn.counts}
    messages: list[Message] = []
    for request_id in sorted(said)[-max_turns:]:
        messages += said[request_id].messages
        messages.append(Message(role="assistant", content=said[request_id].reply))
    return messages
