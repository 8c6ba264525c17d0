"""A token stream as the events of the Responses API.

The events and their ``sequence_number`` are a function of the entries from the stream's start alone: whoever
reads, whenever and in what portions, sees the same events under the same numbers. So a reader that has seen
number n goes on with what follows it, on any gateway. One text entry is one ``response.output_text.delta``.
What differs between readings of one stream, such as the time of reading, is in no event.

The last event is ``response.completed``, ``response.incomplete`` (cut off, or cancelled: its status says
which) or ``response.failed``. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

from contracts.entries import Accepted, Started, StreamEntry, Terminal, Text
from contracts.errors import ErrorBody
from contracts.reply import Reply
from streaming_edge.json_text import json_text

from .objects import Ending, ResponseFacts, response_of, running_response, text_part

#: Before the first event.
NOTHING_SEEN: Final = -1
_LAST: Final = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}


class ResponseEvents:
    """The events of one stream. Entries are given once, in order, from its start.

    Attributes:
        facts: with what the ``0-1`` entry says, once it was given.
        number: of the last event, :data:`NOTHING_SEEN` before it.
        seen: events up to this number are left out.
    """

    def __init__(self, facts: ResponseFacts, seen: int = NOTHING_SEEN) -> None:
        self.facts = facts
        self.number = NOTHING_SEEN
        self.seen = seen
        self._reply = Reply()
        self._running = False
        self._writing = False

    def encode(self, entries: Iterable[StreamEntry]) -> bytes:
        """The events of these entries as server-sent events, joined; may be empty."""
        return b"".join(
            b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json_text(event))
            for event in self.extend(entries)
        )

    def extend(self, entries: Iterable[StreamEntry]) -> list[dict[str, Any]]:
        """The events of these entries that have not been seen."""
        events: list[dict[str, Any]] = []
        for item in entries:
            self._reply.apply(item)
            for event in self._events(item):
                self.number += 1
                if self.number > self.seen:
                    events.append({**event, "sequence_number": self.number})
        return events

    def error(self, body: ErrorBody) -> bytes:
        """An error event: reading broke off here; nothing follows it, and it counts for nothing.

        It is what the official clients raise.
        """
        event = {"type": "error", "error": body.model_dump(), "sequence_number": self.number}
        told = {"code": body.code, "message": body.message, "param": body.param}
        return b"event: error\ndata: %b\n\n" % json_text(event | told)

    def _events(self, item: StreamEntry) -> Iterable[dict[str, Any]]:
        match item.entry:
            case Accepted() as accepted:
                self.facts = self.facts.as_accepted(accepted)
                status: Literal["queued", "in_progress"] = "in_progress"
                if self.facts.background:
                    status = "queued"
                yield self._told("response.created", running_response(self.facts, status))
                if self.facts.background:
                    yield self._told("response.queued", running_response(self.facts, status))
            case Started() if not self._running:
                self._running = True
                yield self._told("response.in_progress", running_response(self.facts, "in_progress"))
            case Text(text=text):
                if not self._writing:
                    yield from self._begin()
                yield self._part("response.output_text.delta", delta=text, logprobs=[])
            case Terminal() as terminal:
                yield from self._end(self._reply.terminal or terminal)
            case _:
                pass

    def _begin(self) -> Iterable[dict[str, Any]]:
        self._writing = True
        item = self.facts.output_item("") | {"status": "in_progress", "content": []}
        yield {"type": "response.output_item.added", "output_index": 0, "item": item}
        yield self._part("response.content_part.added", part=text_part(""))

    def _end(self, terminal: Terminal) -> Iterable[dict[str, Any]]:
        ending = Ending.of(terminal)
        text = self._reply.text
        if ending.status in ("completed", "incomplete"):
            if not self._writing:
                yield from self._begin()
            whole = ending.status == "completed"
            yield self._part("response.output_text.done", text=text, logprobs=[])
            yield self._part("response.content_part.done", part=text_part(text))
            item = self.facts.output_item(text, complete=whole)
            yield {"type": "response.output_item.done", "output_index": 0, "item": item}
        response = response_of(self.facts, self._reply, terminal)
        yield self._told(_LAST[ending.status], response)

    def _part(self, kind: str, **more: Any) -> dict[str, Any]:
        place = {"item_id": self.facts.item_id, "output_index": 0, "content_index": 0}
        return {"type": kind, **place, **more}

    @staticmethod
    def _told(kind: str, response: dict[str, Any]) -> dict[str, Any]:
        return {"type": kind, "response": response}
