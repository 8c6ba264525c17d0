"""The JSON text frames of the websocket, both ways; no I/O.

A client frame is parsed strictly: wrong types, unknown types, lone surrogates, NaN and binary frames are
refused with :class:`FrameError`; fields we do not know are ignored. Server frames are UTF-8 JSON bytes;
the hot one, ``stream.text``, is put together from a template.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from contracts.entries import Accepted, Dispatched, Moderated, Started, StreamEntry, Terminal, Text
from contracts.errors import ApiError, ErrorBody, ErrorCode, error_body
from contracts.limits import Admission
from contracts.records import Usage
from contracts.stream_ids import StreamId

from .json_text import json_text
from .terminal import terminal_error, usage_object

#: Room for what surrounds a chat completion body in its frame.
ENVELOPE_BYTES = 1024

Ref = Annotated[str, Field(max_length=128)] | int
RequestId = Annotated[str, Field(max_length=128)]


class _Frame(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    ref: Ref | None = None


class AuthFrame(_Frame):
    """Who is calling; the first frame where no ``Authorization`` header came."""

    type: Literal["auth"]
    api_key: Annotated[str, Field(min_length=1, max_length=512)] = Field(repr=False)


class CreateFrame(_Frame):
    """Start a chat completion and read its stream from the start; with a key, at most once."""

    type: Literal["chat.create"]
    body: Any = Field(repr=False)
    idempotency_key: str | None = Field(default=None, repr=False)


class SubscribeFrame(_Frame):
    """Read a stream after an offset; None is its start."""

    type: Literal["stream.subscribe"]
    request_id: RequestId
    after: str | None = None


class UnsubscribeFrame(_Frame):
    """Read a stream no longer; its generation goes on."""

    type: Literal["stream.unsubscribe"]
    request_id: RequestId


class CancelFrame(_Frame):
    """End a generation, whoever reads it."""

    type: Literal["chat.cancel"]
    request_id: RequestId


class PingFrame(_Frame):
    """Answered with ``pong``."""

    type: Literal["ping"]


ClientFrame = Annotated[
    AuthFrame | CreateFrame | SubscribeFrame | UnsubscribeFrame | CancelFrame | PingFrame,
    Field(discriminator="type"),
]
_client_frame: TypeAdapter[Any] = TypeAdapter(ClientFrame)


class FrameError(Exception):
    """A client frame that cannot be used; told to the client, and the connection lives on.

    Attributes:
        ref / request_id: what the frame named, as far as it could be read.
    """

    def __init__(
        self, code: ErrorCode, message: str, ref: str | int | None = None, request_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.body = error_body(code, message)
        self.ref = ref
        self.request_id = request_id


def parse_client_frame(data: str | bytes, limit_bytes: int) -> Any:
    """One of the frames of :data:`ClientFrame`.

    Args:
        data: a text frame as str, a binary frame as bytes.
        limit_bytes: largest frame that is taken.

    Raises:
        FrameError: the frame is too large, or not one of them.
    """
    if not isinstance(data, str):
        raise FrameError(ErrorCode.INVALID_FRAME, "Frames are JSON text, not binary.")
    # A character takes 1 to 4 bytes, so most frames need not be encoded to be measured.
    if len(data) > limit_bytes or (len(data) * 4 > limit_bytes and len(data.encode()) > limit_bytes):
        raise FrameError(ErrorCode.REQUEST_TOO_LARGE, f"A frame has at most {limit_bytes} bytes.")
    try:
        raw = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise FrameError(ErrorCode.INVALID_FRAME, "The frame is not valid JSON.") from None
    if not isinstance(raw, dict):
        raise FrameError(ErrorCode.INVALID_FRAME, "A frame is a JSON object.")
    try:
        return _client_frame.validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        # The location begins with the frame's type once that is known.
        known = first["type"] not in ("union_tag_invalid", "union_tag_not_found")
        what = f"{raw['type']}: {first['loc'][1]}" if known else "type"
        raise FrameError(
            ErrorCode.INVALID_FRAME,
            f"The frame is not understood ({what}).",
            _short(raw.get("ref"), str | int),
            _short(raw.get("request_id"), str),
        ) from None


def _short(value: Any, kind: Any) -> Any:
    """``value`` for an echo, if it is of that kind and short."""
    fits = isinstance(value, kind) and not isinstance(value, bool)
    return value if fits and len(str(value)) <= 128 else None


PONG = b'{"type":"pong"}'


def accepted_frame(ref: str | int | None, admission: Admission) -> bytes:
    """``chat.accepted``: comes before every frame of its stream."""
    frame: dict[str, Any] = {
        "type": "chat.accepted",
        "ref": ref,
        "request_id": admission.request_id,
    }
    if admission.rate_limits is not None:
        frame["rate_limits"] = admission.rate_limits.as_json()
    return json_text(frame)


def error_frame(error: ErrorBody, ref: str | int | None = None, request_id: str | None = None) -> bytes:
    """``error``: about the frame with this ref, or the reading of this stream."""
    return json_text(_error(error, ref, request_id))


def refusal_frame(error: ApiError, ref: str | int | None) -> bytes:
    """``error`` for a request that was not accepted: when to try again, and the caller's limits."""
    frame = _error(error.body, ref, None)
    if error.retry_after_seconds is not None:
        frame["retry_after_seconds"] = error.retry_after_seconds
    if error.rate_limits is not None:
        frame["rate_limits"] = error.rate_limits.as_json()
    return json_text(frame)


def _error(error: ErrorBody, ref: str | int | None, request_id: str | None) -> dict[str, Any]:
    body = error.model_dump()
    return {"type": "error", "ref": ref, "request_id": request_id, "error": body}


class StreamFrames:
    """Frames of one stream's entries."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._text_head = b'{"type":"stream.text","request_id":' + json_text(request_id) + b',"offset":"'

    def encode(self, item: StreamEntry) -> bytes:
        """The frame of one entry. A terminal entry must carry its usage."""
        entry = item.entry
        if isinstance(entry, Text):
            logprobs = (
                b"" if entry.logprobs is None else b',"logprobs":' + json_text(list(entry.logprobs))
            )
            return b'%b%d-%d","index":%d,"text":%b%b}' % (
                self._text_head,
                *item.id,
                entry.index,
                json_text(entry.text),
                logprobs,
            )
        if isinstance(entry, Terminal):
            return self._end(item.id, entry)
        frame: dict[str, Any] = {
            "type": "stream.status",
            "request_id": self._request_id,
            "offset": str(item.id),
            "status": _status(item.id, entry),
        }
        if isinstance(entry, Accepted) and entry.degraded is not None:
            frame |= {"model": entry.model, "degraded": entry.degraded.model_dump()}
        return json_text(frame)

    def _end(self, entry_id: StreamId, terminal: Terminal) -> bytes:
        error = terminal_error(terminal)
        reasons = [str(reason) for reason in terminal.finish_reasons]
        frame: dict[str, Any] = {
            "type": "stream.end",
            "request_id": self._request_id,
            "offset": str(entry_id),
            "status": str(terminal.status),
            "finish_reason": reasons[0] if reasons else None,
            "usage": usage_object(terminal.usage or Usage()),
            "error": error.model_dump() if error is not None else None,
        }
        if len(reasons) > 1:
            frame["finish_reasons"] = reasons
        return json_text(frame)


def _status(entry_id: StreamId, entry: Accepted | Moderated | Dispatched | Started) -> str:
    match entry:
        case Accepted():
            return "accepted"
        case Moderated():
            return "moderated"
        case Dispatched():
            return "dispatched"
        case Started():
            return "started" if entry_id.attempt == 1 else "resumed"
