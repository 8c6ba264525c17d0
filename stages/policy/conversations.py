"""Requests of one conversation run one after another, in the order they were queued."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .line import Line
from .request import Request


@dataclass(slots=True)
class _Conversation:
    """Requests that wait, the one of them that may be served, and how many are in flight."""

    waiting: Line = field(default_factory=Line)
    first: Request | None = None
    flying: int = 0


class Change(NamedTuple):
    """What a call has changed: who may be served from now on, and who may no longer."""

    may: Request | None
    may_not: Request | None


class Conversations:
    """Says which waiting requests may be served; one without a conversation always may."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], _Conversation] = {}

    def waits(self, request: Request) -> Change:
        """A request waits."""
        key = _key(request)
        if key is None:
            return Change(request, None)
        conversation = self._open.setdefault(key, _Conversation())
        conversation.waiting.add(request)
        return self._update(key, conversation)

    def leaves(self, request: Request, *, flies: bool) -> Change:
        """A request waits no more: it flies from now on, or has ended."""
        key = _key(request)
        if key is None:
            return Change(None, request)
        conversation = self._open[key]
        conversation.waiting.remove(request)
        conversation.flying += flies
        return self._update(key, conversation)

    def landed(self, request: Request) -> Change:
        """A request is no longer in flight."""
        key = _key(request)
        if key is None:
            return Change(None, None)
        conversation = self._open[key]
        conversation.flying -= 1
        return self._update(key, conversation)

    def _update(self, key: tuple[str, str], conversation: _Conversation) -> Change:
        """Make the earliest the first one, unless one is in flight."""
        before = conversation.first
        if not conversation.waiting and not conversation.flying:
            del self._open[key]
        conversation.first = None if conversation.flying else conversation.waiting.head()
        if conversation.first is before:
            return Change(None, None)
        return Change(conversation.first, before)


def _key(request: Request) -> tuple[str, str] | None:
    conversation_id = request.job.conversation_id
    return (request.job.tenant, conversation_id) if conversation_id is not None else None
