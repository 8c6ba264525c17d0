"""One websocket: performs what its session decides, and runs a pump per stream it reads.

Nothing piles up: a pump takes the next entries only when the socket has taken the last ones, and what
waits meanwhile waits in Redis. Disconnects at any moment are normal.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from opentelemetry.trace import Span, SpanKind
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from contracts.entries import Accepted, Entry, StreamEntry, Terminal
from contracts.errors import ApiError, ErrorBody, ErrorCode
from contracts.identity import Principal
from contracts.reply import Reply
from contracts.stream_ids import START, StreamId
from contracts.token_stream import StreamsUnavailable
from infra.tasks import end_tasks
from infra.telemetry import end_span, start_span, traceparent_of

from .close_codes import CloseCase
from .errors import StreamLost
from .frames import StreamFrames, error_frame
from .offsets import check_offset
from .protocols import Door, EntrySource, Intake, StreamHub, StreamStore
from .session import (
    Authenticate,
    Cancel,
    CloseSocket,
    Create,
    Effect,
    Read,
    Send,
    Session,
    SessionLimits,
    Unread,
)
from .terminal import BEFORE_SEAL

log = logging.getLogger(__name__)

#: Time a client gets to answer a close frame.
CLOSE_TIMEOUT_SECONDS = 5.0
_ABORT_SECONDS = 1.0
_IDLE_SECONDS = 30.0
_UNAVAILABLE = ApiError(
    ErrorCode.UNAVAILABLE,
    "A service is not reachable right now; try again.",
    retry_after_seconds=1,
)


@dataclass(frozen=True)
class EdgeParts:
    """What every socket of an edge shares."""

    door: Door
    intake: Intake
    streams: StreamStore
    hub: StreamHub
    limits: SessionLimits
    send_timeout_seconds: float


@dataclass(slots=True)
class _Pump:
    task: asyncio.Task[None]
    unread: bool = False


class Socket:
    """An open websocket.

    Args:
        principal: who calls, where the ``Authorization`` header has said so.
    """

    def __init__(
        self, connection: ServerConnection, parts: EdgeParts, principal: Principal | None
    ) -> None:
        self._connection = connection
        self._parts = parts
        self._clock = asyncio.get_running_loop().time
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumps: dict[int, _Pump] = {}
        self._sending = 0
        self._progress_at = self._clock()
        self.closing = False
        self.session = Session(parts.limits, self._clock(), principal)

    async def run(self) -> None:
        """Serve the socket until it closes."""
        try:
            async for data in self._connection:
                await self._perform(self.session.receive(data, self._clock()))
        except ConnectionClosed:
            pass
        finally:
            reading = len(self._pumps)
            await end_tasks(self._tasks.copy())
            log.info("socket closed", extra={"code": self._connection.close_code, "reading": reading})

    async def close(self, case: CloseCase, patience_seconds: float = math.inf) -> None:
        """Close by the table of close codes; bounded, and in the end abrupt for who does not listen.

        Args:
            patience_seconds: how long the client has to listen; never longer than some seconds.
        """
        self.closing = True
        # The protocol's own close timeout begins only when the close frame could be written.
        patience = _ABORT_SECONDS if case is CloseCase.TOO_SLOW else CLOSE_TIMEOUT_SECONDS + 1.0
        try:
            async with asyncio.timeout(min(patience, patience_seconds)):
                await self._connection.close(case.value.code, case.value.reason)
        except TimeoutError:
            self._connection.transport.abort()

    def overdue(self) -> CloseCase | None:
        """Why the socket must be closed now, if it must: no key in time, or nothing taken for too long."""
        now = self._clock()
        if self._sending and now - self._progress_at > self._parts.send_timeout_seconds:
            return CloseCase.TOO_SLOW
        return self.session.overdue(now)

    async def _send(self, frame: bytes) -> None:
        if not self._sending:
            self._progress_at = self._clock()
        self._sending += 1
        try:
            await self._connection.send(frame, text=True)
        finally:
            self._sending -= 1
            self._progress_at = self._clock()

    async def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(frame):
                    await self._send(frame)
                case Read(serial=serial):
                    self._pumps[serial] = pump = _Pump(self._spawn(self._read(effect)))
                    pump.task.add_done_callback(partial(self._forget, serial))
                case Unread(serial=serial):
                    if serial in self._pumps:
                        self._pumps[serial].unread = True
                        self._pumps[serial].task.cancel()
                case Create():
                    self._spawn(self._create(effect))
                case Cancel(serial=serial):
                    self._spawn(self._cancel(effect, self._pumps.get(serial or 0)))
                case Authenticate(api_key):
                    await self._perform(self._authenticate(api_key))
                case CloseSocket(case):
                    # Beside the reading of frames, or the client's answer might wait behind them.
                    self._spawn(self.close(case))

    def _forget(self, serial: int, _: asyncio.Task[None]) -> None:
        del self._pumps[serial]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except ConnectionClosed:
            pass
        except Exception:
            # A bug of ours must not look like a quiet stream: the client reconnects at its offset.
            log.exception("a socket's task failed")
            await self.close(CloseCase.INTERNAL)

    def _authenticate(self, api_key: str) -> list[Effect]:
        try:
            return self.session.authenticated(self._parts.door.authenticate(api_key))
        except ApiError as error:
            return self.session.not_authenticated(error.body)

    @property
    def _principal(self) -> Principal:
        assert self.session.principal is not None
        return self.session.principal

    async def _create(self, effect: Create) -> None:
        # The root of the request's trace: every other role's spans come under it.
        span = start_span(
            "chat.create", None, kind=SpanKind.SERVER, attributes={"gen_ai.operation.name": "chat"}
        )
        fault: str | None = "cancelled"
        try:
            admission = await self._parts.intake.accept(
                self._principal,
                effect.body,
                traceparent=traceparent_of(span),
                idempotency_key=effect.idempotency_key,
            )
            span.set_attribute("gen_ai.response.id", admission.request_id)
            outcome = self.session.accepted(effect.ref, admission)
            fault = None
        except ApiError as error:
            outcome = self.session.refused(effect.ref, error)
            fault = error.code.value if error.status >= 500 else None
        except StreamsUnavailable:
            outcome = self.session.refused(effect.ref, _UNAVAILABLE)
            fault = _UNAVAILABLE.code.value
        finally:
            end_span(span, fault)
        await self._perform(outcome)

    async def _cancel(self, effect: Cancel, pump: _Pump | None) -> None:
        request_id = effect.request_id
        try:
            await self._parts.intake.cancel(self._principal, request_id)
            if pump is not None and not pump.unread:
                return  # the reading brings the end, or has brought it
            items = await self._parts.streams.read(request_id, BEFORE_SEAL, 1)
            if not items:
                raise ApiError(ErrorCode.STREAM_EXPIRED, "The reply's token stream has expired.")
            await self._send(
                StreamFrames(request_id).encode(await self._with_usage(request_id, items[0]))
            )
        except ApiError as error:
            await self._send(error_frame(error.body, effect.ref, request_id))
        except StreamsUnavailable:
            await self._send(error_frame(_UNAVAILABLE.body, effect.ref, request_id))
        finally:
            self.session.cancel_done()

    async def _read(self, effect: Read) -> None:
        error: ErrorBody | None = None
        try:
            if not effect.owned:
                await self._parts.intake.authorize(self._principal, effect.request_id)
            after = START
            if effect.after is not None:
                after = await check_offset(self._parts.streams, effect.request_id, effect.after)
            async with self._parts.hub.subscribe(effect.request_id, after) as subscription:
                await self._pump(effect, after, subscription)
        except ApiError as refusal:
            error = refusal.body
        except StreamsUnavailable:
            error = _UNAVAILABLE.body
        finally:
            self.session.reading_ended(effect.request_id, effect.serial)
        if error is not None:
            await self._send(error_frame(error, None, effect.request_id))

    async def _pump(self, effect: Read, after: StreamId, subscription: EntrySource) -> None:
        request_id = effect.request_id
        frames = StreamFrames(request_id)
        span = None
        outcome: str | None = "cancelled"
        try:
            if after > START:
                first = await self._parts.streams.read(request_id, START, 1)
                span = _span(request_id, first[0].entry if first else None, resumed=True)
            while not subscription.ended and self.session.is_reading(request_id, effect.serial):
                for item in await subscription.next(_IDLE_SECONDS):
                    if span is None:
                        span = _span(request_id, item.entry, resumed=False)
                    if isinstance(item.entry, Terminal):
                        item = await self._with_usage(request_id, item)
                        # Before the frame: a subscribe sent in answer to it begins a new reading.
                        self.session.reading_ended(request_id, effect.serial)
                    await self._send(frames.encode(item))
            outcome = None
        except StreamLost as lost:
            outcome = lost.code.value
            raise
        finally:
            if span is not None:
                end_span(span, outcome)

    async def _with_usage(self, request_id: str, item: StreamEntry) -> StreamEntry:
        """A terminal entry with its usage: what it states, else what the stream shows."""
        terminal = item.entry
        if not isinstance(terminal, Terminal) or terminal.usage is not None:
            return item
        usage = Reply().extend(await self._parts.streams.read_all(request_id)).usage
        return StreamEntry(item.id, terminal.model_copy(update={"usage": usage}))


def _span(request_id: str, first: Entry | None, *, resumed: bool) -> Span:
    """The span of one reading, in the trace of its request (the ``0-1`` entry carries it)."""
    traceparent = first.traceparent if isinstance(first, Accepted) else None
    attributes = {"gen_ai.response.id": request_id, "headrace.resumed": resumed}
    return start_span("edge.read", traceparent, attributes=attributes)
