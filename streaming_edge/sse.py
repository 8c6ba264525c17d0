"""Token streams as server-sent events of the OpenAI chat API.

Offsets: every event has an ``id:`` after which a resume gives exactly what follows the event. The role
chunk, the finish and usage chunks and an error stand for no entry of their own, so they carry the id of
the entry before them: a drop between them repeats them, and loses nothing. Only ``[DONE]`` carries the
seal's id.

Ends: a reply that completed ends with a finish chunk per choice and ``[DONE]``. Any other end is an
``error`` event and nothing after it, so that no client takes it for a whole answer; the official client
raises ``APIError`` on it. That goes for a cancelled reply too: finish reason ``stop`` would tell a second
reader that the text is complete.

Comments: a bare comment line, with no blank line after it. The official Python client keeps the last
``id:`` and takes a blank line after a comment for an event without data, which it then fails to parse.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable
from typing import Protocol

from contracts.entries import Accepted, Dispatched, Moderated, Started, StreamEntry, Terminal, Text
from contracts.errors import ErrorBody, ErrorCode, error_body
from contracts.records import Usage
from contracts.stream_ids import SEAL, START, StreamId
from contracts.token_stream import StreamsUnavailable

from .errors import StreamLost
from .json_text import json_text
from .protocols import EntrySource
from .terminal import terminal_error, usage_object

KEEPALIVE = b": keepalive\n"

#: Goes with every SSE response (F8): nothing on the way may compress, rewrite or collect the events.
SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}


class ChatChunkEncoder:
    """Events of one reading of one stream. Entries are given once, in order.

    Args:
        request_id: also the id of the completion.
        model: canonical name of the model that runs; the ``0-1`` entry, where it is read, has the last word.
        created_s: acceptance of the request, Unix seconds.
        include_usage: ``stream_options.include_usage`` of the request.
        after: offset the reading resumes after.
        begun: choices with text at or before ``after`` (:func:`streaming_edge.offsets.begun_choices`);
            None: choice 0 if ``after`` is a text entry.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        created_s: int,
        include_usage: bool,
        after: StreamId = START,
        begun: Collection[int] | None = None,
    ) -> None:
        self._meta = {"id": request_id, "object": "chat.completion.chunk", "created": created_s}
        self._head = self._head_for(model)
        self._tail = (b'],"usage":null}' if include_usage else b"]}") + b"\n\n"
        self._include_usage = include_usage
        resumed_in_text = after.attempt > 0 and after.token > 0
        self._begun = set(begun) if begun is not None else {0} if resumed_in_text else set()
        self._last = after
        self._prompt_tokens = 0
        self._tokens_out = after.token if resumed_in_text and after != SEAL else 0

    @property
    def offset(self) -> StreamId:
        """The last entry that was encoded, or the offset the reading began after."""
        return self._last

    def encode(self, entries: Iterable[StreamEntry]) -> bytes:
        """The events of these entries, joined; may be empty."""
        parts: list[bytes] = []
        for item in entries:
            entry = item.entry
            if isinstance(entry, Text):
                if entry.index not in self._begun:
                    self._begin(entry.index, parts)
                parts.append(self._text(item.id, entry))
                self._tokens_out = item.id.token
            elif isinstance(entry, Terminal):
                self._end(entry, parts)
            else:
                parts.append(self._comment(item.id, entry))
            self._last = item.id
        return b"".join(parts)

    def error(self, body: ErrorBody) -> bytes:
        """An error event; nothing may follow it."""
        return self._id() + b'data: {"error":' + json_text(body.model_dump()) + b"}\n\n"

    def _text(self, entry_id: StreamId, entry: Text) -> bytes:
        logprobs = b"null"
        if entry.logprobs is not None:
            logprobs = json_text({"content": list(entry.logprobs), "refusal": None})
        return (
            b'id: %d-%d\n%b{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}%b'
            % (*entry_id, self._head, entry.index, json_text(entry.text), logprobs, self._tail)
        )

    def _comment(self, entry_id: StreamId, entry: Accepted | Moderated | Dispatched | Started) -> bytes:
        match entry:
            case Accepted(model=model):
                self._head = self._head_for(model)
                return b": accepted\n"
            case Moderated(prompt_tokens=count):
                self._prompt_tokens = count
                return b": moderated\n"
            case Dispatched(prompt_tokens=again):
                self._prompt_tokens = self._prompt_tokens if again is None else again
                return b": dispatched\n"
            case Started():
                return b": started\n" if entry_id.attempt == 1 else b": resumed\n"

    def _head_for(self, model: str) -> bytes:
        """What every chunk begins with."""
        return b"data: " + json_text(self._meta | {"model": model})[:-1] + b',"choices":['

    def _id(self) -> bytes:
        return b"" if self._last == START or self._last.is_seal else b"id: %d-%d\n" % self._last

    def _begin(self, index: int, parts: list[bytes]) -> None:
        self._begun.add(index)
        delta = b'{"role":"assistant","content":""}'
        parts.append(self._chunk(b'{"index":%d,"delta":%b,"finish_reason":null}' % (index, delta)))

    def _chunk(self, choice: bytes) -> bytes:
        return self._id() + self._head + choice + self._tail

    def _end(self, terminal: Terminal, parts: list[bytes]) -> None:
        error = terminal_error(terminal)
        if error is not None:
            parts.append(self.error(error))
            return
        if not self._last.is_seal:
            self._finish(terminal, parts)
        parts.append(b"id: %d-%d\ndata: [DONE]\n\n" % SEAL)

    def _finish(self, terminal: Terminal, parts: list[bytes]) -> None:
        reasons = [str(reason) for reason in terminal.finish_reasons]
        for index in range(max(len(reasons), max(self._begun, default=0) + 1)):
            if index not in self._begun:
                self._begin(index, parts)
            reason = reasons[index] if index < len(reasons) else "stop"
            parts.append(
                self._chunk(b'{"index":%d,"delta":{},"finish_reason":%b}' % (index, json_text(reason)))
            )
        if self._include_usage:
            usage = terminal.usage or Usage(
                prompt_tokens=self._prompt_tokens, completion_tokens=self._tokens_out
            )
            body = b'],"usage":' + json_text(usage_object(usage)) + b"}\n\n"
            parts.append(self._id() + self._head + body)


class EventEncoder(Protocol):
    """Turns the entries of one reading into events."""

    def encode(self, entries: Iterable[StreamEntry]) -> bytes:
        """The events of these entries, joined; may be empty."""

    def error(self, body: ErrorBody) -> bytes:
        """An error event; nothing may follow it."""


async def sse_body(
    subscription: EntrySource, encoder: EventEncoder, keepalive_seconds: float
) -> AsyncIterator[bytes]:
    """The body of an SSE response, one bytes object per batch of entries.

    Ends after the terminal entry. When reading itself fails, the last event is an error: ``stream_lost``,
    or ``service_unavailable`` when this process stops, and then a resume elsewhere gives the rest.
    """
    while not subscription.ended:
        try:
            entries = await subscription.next(keepalive_seconds)
        except StreamLost as lost:
            yield encoder.error(lost.body)
            return
        except StreamsUnavailable:
            message = "The server is restarting; resume the reply after the last event's id."
            yield encoder.error(error_body(ErrorCode.UNAVAILABLE, message))
            return
        if entries:
            yield encoder.encode(entries)
        elif not subscription.ended:
            yield KEEPALIVE
