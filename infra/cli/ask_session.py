"""One question over the websocket, as a state machine: frames in, what to show out. No I/O, no clock."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.stream_ids import StreamId
from streaming_edge.close_codes import CloseCase

#: Close codes after which connecting again would end the same way.
STOP_CLOSE_CODES = frozenset(case.value.code for case in CloseCase if not case.value.reconnect)


@dataclass(frozen=True, slots=True)
class Progress:
    """The request has come further; nothing to read yet."""

    status: str


@dataclass(frozen=True, slots=True)
class ReplyText:
    """More of the reply."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The request is over.

    Attributes:
        status: its terminal state.
        message: what went wrong, for people; None when nothing did.
    """

    status: str
    message: str | None


class AskSession:
    """What is known of one request, over all connections it takes to read its reply."""

    def __init__(
        self, question: str, model: str, max_tokens: int | None, temperature: float | None = None
    ) -> None:
        self._body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
        }
        if max_tokens is not None:
            self._body["max_tokens"] = max_tokens
        if temperature is not None:
            self._body["temperature"] = temperature
        #: Makes it safe to ask again on a new connection when nothing is known of the first.
        self._idempotency_key = uuid.uuid4().hex
        self.request_id: str | None = None
        self.ended: Ended | None = None
        self._offset: StreamId | None = None
        self._asked: float | None = None
        self._first_text: float | None = None
        self._last_text: float | None = None
        self._tokens: int | None = None

    def opening(self, api_key: str, now: float) -> list[dict[str, Any]]:
        """The frames to send on a new connection: ask, or read on where the last one ended."""
        frames: list[dict[str, Any]] = [{"type": "auth", "api_key": api_key}]
        if self.request_id is None:
            self._asked = now if self._asked is None else self._asked
            create = {"type": "chat.create", "ref": "ask", "body": self._body}
            frames.append(create | {"idempotency_key": self._idempotency_key})
        else:
            after = str(self._offset) if self._offset is not None else None
            frames.append({"type": "stream.subscribe", "request_id": self.request_id, "after": after})
        return frames

    def cancel(self) -> dict[str, Any] | None:
        """The frame that cancels the request; None while it has no id."""
        if self.request_id is None:
            return None
        return {"type": "chat.cancel", "request_id": self.request_id}

    def receive(self, frame: Mapping[str, Any], now: float) -> Progress | ReplyText | Ended | None:
        """What a frame means for the person who waits; None for nothing.

        Args:
            now: seconds, on the clock of :meth:`opening`.
        """
        kind = frame.get("type")
        if kind == "error":
            return self._end("failed", _message(frame))
        if kind == "chat.accepted":
            self.request_id = str(frame["request_id"])
            return Progress("accepted")
        if frame.get("request_id") != self.request_id or self.request_id is None:
            return None
        if kind in ("stream.status", "stream.text") and not self._is_new(str(frame["offset"])):
            return None
        if kind == "stream.status":
            return Progress(str(frame["status"]))
        if kind == "stream.text":
            self._first_text = self._first_text or now
            self._last_text = now
            return ReplyText(str(frame["text"]))
        if kind == "stream.end":
            self._tokens = (frame.get("usage") or {}).get("completion_tokens")
            return self._end(str(frame["status"]), _message(frame) if frame.get("error") else None)
        return None

    def figures(self) -> str:
        """Time to first token and speed, as far as they are known."""
        parts = []
        if self._first_text is not None and self._asked is not None:
            parts.append(f"first token after {1000 * (self._first_text - self._asked):.0f} ms")
        if self._tokens is not None:
            parts.append(f"{self._tokens} tokens")
            if self._first_text is not None and self._last_text is not None:
                seconds = self._last_text - self._first_text
                if self._tokens > 1 and seconds > 0:
                    parts.append(f"{(self._tokens - 1) / seconds:.1f} tokens/s")
        return ", ".join(parts)

    def _is_new(self, offset: str) -> bool:
        """Move on to this offset, unless it was reached before."""
        read = StreamId.parse(offset)
        if self._offset is not None and read <= self._offset:
            return False
        self._offset = read
        return True

    def _end(self, status: str, message: str | None) -> Ended:
        self.ended = Ended(status, message)
        return self.ended


def _message(frame: Mapping[str, Any]) -> str:
    error = frame.get("error") or {}
    return str(error.get("message") or error.get("code") or "an error without a message")
