"""One websocket's session, without I/O: frames and results in, effects out.

The shell (:mod:`streaming_edge.socket_websockets`) performs the effects in order and reports back what
became of them. Time is passed in, in monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from contracts.errors import ApiError, ErrorBody, ErrorCode, error_body
from contracts.identity import Principal
from contracts.limits import Admission

from .close_codes import CloseCase
from .frames import (
    ENVELOPE_BYTES,
    PONG,
    AuthFrame,
    CancelFrame,
    CreateFrame,
    FrameError,
    PingFrame,
    SubscribeFrame,
    UnsubscribeFrame,
    accepted_frame,
    error_frame,
    parse_client_frame,
    refusal_frame,
)

_BURST_SECONDS = 4.0


@dataclass(frozen=True)
class SessionLimits:
    """Bounds of one socket; see :class:`infra.settings.EdgeSettings` and ``HttpSettings``."""

    max_body_bytes: int
    max_streams: int
    frames_per_second: float
    auth_timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Send:
    """Send a frame."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class Authenticate:
    """Look up a key; report with :meth:`Session.authenticated` or :meth:`Session.not_authenticated`."""

    api_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Create:
    """Accept a request; report with :meth:`Session.accepted` or :meth:`Session.refused`."""

    ref: str | int | None
    body: Any = field(repr=False)
    idempotency_key: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class Read:
    """Begin a reading; report with :meth:`Session.reading_ended`.

    Attributes:
        after: offset as the client gave it, unchecked; None is the start.
        serial: which reading this is, among all of the socket's.
        owned: the request was created on this socket, so its owner is known.
    """

    request_id: str
    after: str | None
    serial: int
    owned: bool


@dataclass(frozen=True, slots=True)
class Unread:
    """Stop a reading."""

    request_id: str
    serial: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request; report with :meth:`Session.cancel_done`.

    Attributes:
        serial: the reading that will bring its end; None where this socket does not read it.
    """

    ref: str | int | None
    request_id: str
    serial: int | None


@dataclass(frozen=True, slots=True)
class CloseSocket:
    """Close the socket; nothing else is done with it."""

    case: CloseCase


Effect: TypeAlias = Send | Authenticate | Create | Read | Unread | Cancel | CloseSocket


class Session:
    """State of one socket.

    Args:
        now: time of the connection.
        principal: who calls, where a header has said so already.

    Attributes:
        draining: the socket is about to be closed with "reconnect": no request is begun any more.
    """

    def __init__(self, limits: SessionLimits, now: float, principal: Principal | None = None) -> None:
        self._limits = limits
        self._burst = limits.frames_per_second * _BURST_SECONDS
        self._frames_left = self._burst
        self._frames_at = now
        self._opened_at = now
        self._serial = 0
        self._readings: dict[str, int] = {}
        self._creating = 0
        self._cancelling = 0
        self._closed = False
        self.principal = principal
        self.draining = False

    @property
    def creating(self) -> int:
        """Requests that are being accepted."""
        return self._creating

    def is_reading(self, request_id: str, serial: int) -> bool:
        """Whether that reading goes on."""
        return self._readings.get(request_id) == serial

    def overdue(self, now: float) -> CloseCase | None:
        """Whether the socket has had its time to authenticate."""
        late = self.principal is None and now - self._opened_at > self._limits.auth_timeout_seconds
        return CloseCase.AUTH_TIMEOUT if late else None

    def receive(self, data: str | bytes, now: float) -> list[Effect]:
        """A frame has come."""
        if self._closed:
            return []
        if not self._within_rate(now):
            error = error_body(ErrorCode.RATE_LIMITED, "Too many frames.")
            return [Send(error_frame(error)), self._close(CloseCase.TOO_MANY_FRAMES)]
        try:
            frame = parse_client_frame(data, self._limits.max_body_bytes + ENVELOPE_BYTES)
        except FrameError as error:
            return [Send(error_frame(error.body, error.ref, error.request_id))]
        if isinstance(frame, PingFrame):
            return [Send(PONG)]
        if isinstance(frame, AuthFrame):
            return [Authenticate(frame.api_key)]
        if self.principal is None:
            message = "Send an auth frame first."
            return [_error(ErrorCode.NOT_AUTHENTICATED, message, frame.ref, _named(frame))]
        match frame:
            case CreateFrame():
                # Unanswered while draining: nothing was begun, and the close that follows says "reconnect".
                return [] if self.draining else [self._create(frame)]
            case SubscribeFrame():
                return self._subscribe(frame)
            case UnsubscribeFrame(request_id=request_id):
                serial = self._readings.pop(request_id, None)
                return [] if serial is None else [Unread(request_id, serial)]
            case CancelFrame():
                return [self._cancel(frame)]
        raise AssertionError(f"unhandled frame {frame.type}")

    def authenticated(self, principal: Principal) -> list[Effect]:
        """The key was good. A socket keeps the principal it began with."""
        if self.principal is not None and self.principal != principal:
            message = "This socket is already authenticated with another key."
            return [_error(ErrorCode.INVALID_FRAME, message, None, None)]
        self.principal = principal
        return []

    def not_authenticated(self, error: ErrorBody) -> list[Effect]:
        """The key was bad."""
        return [Send(error_frame(error)), self._close(CloseCase.INVALID_API_KEY)]

    def accepted(self, ref: str | int | None, admission: Admission) -> list[Effect]:
        """A request of this socket was accepted: say so, then read its stream."""
        self._creating -= 1
        request_id = admission.request_id
        said: list[Effect] = [Send(accepted_frame(ref, admission))]
        # A repeated request may have been given the id of one that this socket reads already.
        if request_id not in self._readings:
            said.append(self._read(request_id, None, owned=True))
        return said

    def refused(self, ref: str | int | None, error: ApiError) -> list[Effect]:
        """A request of this socket was not accepted."""
        self._creating -= 1
        return [Send(refusal_frame(error, ref))]

    def reading_ended(self, request_id: str, serial: int) -> None:
        """A reading is over (its end or an error is about to be sent). Late reports are ignored."""
        if self.is_reading(request_id, serial):
            del self._readings[request_id]

    def cancel_done(self) -> None:
        """A :class:`Cancel` was carried out, or failed."""
        self._cancelling -= 1

    def _create(self, frame: CreateFrame) -> Effect:
        if self._full():
            return self._too_many_streams(frame.ref, None)
        self._creating += 1
        return Create(frame.ref, frame.body, frame.idempotency_key)

    def _subscribe(self, frame: SubscribeFrame) -> list[Effect]:
        if frame.request_id in self._readings:
            return []
        if self._full():
            return [self._too_many_streams(frame.ref, frame.request_id)]
        return [self._read(frame.request_id, frame.after, owned=False)]

    def _cancel(self, frame: CancelFrame) -> Effect:
        if self._cancelling >= self._limits.max_streams:
            message = "Too many cancellations at once."
            return _error(ErrorCode.RATE_LIMITED, message, frame.ref, frame.request_id)
        self._cancelling += 1
        return Cancel(frame.ref, frame.request_id, self._readings.get(frame.request_id))

    def _read(self, request_id: str, after: str | None, *, owned: bool) -> Read:
        self._serial += 1
        self._readings[request_id] = self._serial
        return Read(request_id, after, self._serial, owned)

    def _full(self) -> bool:
        return len(self._readings) + self._creating >= self._limits.max_streams

    def _too_many_streams(self, ref: str | int | None, request_id: str | None) -> Send:
        message = f"A socket reads at most {self._limits.max_streams} streams at once."
        return _error(ErrorCode.TOO_MANY_STREAMS, message, ref, request_id)

    def _within_rate(self, now: float) -> bool:
        """Token bucket: ``frames_per_second`` on average, four seconds' worth at once."""
        gained = (now - self._frames_at) * self._limits.frames_per_second
        self._frames_at = now
        self._frames_left = min(self._burst, self._frames_left + gained)
        if self._frames_left < 1.0:
            return False
        self._frames_left -= 1.0
        return True

    def _close(self, case: CloseCase) -> CloseSocket:
        self._closed = True
        return CloseSocket(case)


def _named(frame: CreateFrame | SubscribeFrame | UnsubscribeFrame | CancelFrame) -> str | None:
    return None if isinstance(frame, CreateFrame) else frame.request_id


def _error(code: ErrorCode, message: str, ref: str | int | None, request_id: str | None) -> Send:
    return Send(error_frame(error_body(code, message), ref, request_id))
