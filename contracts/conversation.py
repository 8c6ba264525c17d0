"""Stored conversations: what a turn is, and which turns the next prompt is made of."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from .identity import time_part
from .records import Message, OutcomeRecord
from .reply import Reply
from .tiers import Status

#: Statuses whose turns are part of the conversation. What failed, was refused or expired never was said.
_SAID = frozenset({Status.COMPLETED, Status.CANCELLED})


_ITEM_ID = re.compile(r"msg_([0-9a-f]{32})_(0|[1-9][0-9]{0,3})", re.ASCII)


class Item(NamedTuple):
    """One message of a conversation, the model's replies included.

    Attributes:
        id: stays the same for as long as the conversation lives.
        complete: False for a reply that was cancelled.
    """

    id: str
    message: Message
    complete: bool


class ConversationFacts(BaseModel):
    """What is known of a conversation that a caller made, beside its turns.

    Attributes:
        created: Unix seconds.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    created: int
    metadata: dict[str, str]


class Turn(BaseModel):
    """One request of a conversation and what was answered, or messages that were added by hand.

    Attributes:
        request_id: orders turns, because such ids order by the time of acceptance (:func:`time_part`).
        messages: what the request added.
        reply: text of choice 0; partial where the turn was cancelled; None where nothing was asked.
        removed: positions of messages that were taken out again, the reply's being after all others.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    request_id: str
    created_ms: int
    messages: list[Message]
    reply: str | None
    status: Status
    removed: frozenset[int] = frozenset()

    @property
    def counts(self) -> bool:
        """Whether later turns see this one.

        Completed turns do, and cancelled ones with the text that was out. A cancelled turn without text
        and every other turn are left out whole, question included, so that no error is ever an answer.
        """
        has_text = self.status is Status.COMPLETED or bool(self.reply) or bool(self.removed)
        return self.status in _SAID and has_text

    def items(self) -> list[Item]:
        """What was said in it, in order."""
        name = f"msg_{time_part(self.request_id)}"
        items = [Item(f"{name}_{at}", message, True) for at, message in enumerate(self.messages)]
        if self.reply is not None:
            said = Message(role="assistant", content=self.reply)
            items.append(Item(f"{name}_{len(items)}", said, self.status is Status.COMPLETED))
        return [item for at, item in enumerate(items) if at not in self.removed]

    def without(self, position: int) -> Turn:
        """The turn after one of its messages was taken out, text included; the others keep their ids."""
        emptied = [
            message.model_copy(update={"content": "", "name": None}) if at == position else message
            for at, message in enumerate(self.messages)
        ]
        update: dict[str, object] = {"messages": emptied, "removed": self.removed | {position}}
        if position == len(self.messages):
            update["reply"] = ""
        return self.model_copy(update=update)


def item_position(item_id: str) -> tuple[str, int] | None:
    """Which turn an item is of (the time part of its id) and its position there; None for what is no id."""
    match = _ITEM_ID.fullmatch(item_id)
    return (match[1], int(match[2])) if match is not None else None


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
    latest = sorted(said, key=time_part)[-max_turns:]
    return [item.message for request_id in latest for item in said[request_id].items()]
