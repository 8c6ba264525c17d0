"""The websocket server: handshakes, the set of open sockets, closing the overdue ones, draining."""

from __future__ import annotations

import asyncio
import http
import logging
import socket as sockets
from collections.abc import Container, Coroutine
from typing import Any
from weakref import WeakKeyDictionary

import orjson
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHeader
from websockets.http11 import Request, Response

from contracts.errors import ApiError, ErrorBody, ErrorCode, error_body
from contracts.identity import Principal
from infra.listeners import BACKLOG
from infra.settings import Settings
from infra.tasks import end_tasks
from infra.telemetry import SOCKETS

from .close_codes import CloseCase
from .handshake import HEALTH_PATH, PATH, bearer_key, origin_allowed
from .protocols import Door, Intake, StreamHub, StreamStore
from .session import SessionLimits
from .socket_websockets import CLOSE_TIMEOUT_SECONDS, EdgeParts, Socket

log = logging.getLogger(__name__)

PING_INTERVAL_SECONDS = 20.0
_WATCH_SECONDS = 0.5
#: Frames that wait to be handled; with their largest size this bounds what a socket can make us hold.
_FRAMES_WAITING = 4
#: A frame up to this many times the limit is read, so that it can be refused with an error frame.
_OVERSIZE_READ = 2
#: Time a client gets to answer the close frame of a server that cannot wait any longer.
_FAREWELL_SECONDS = 0.5
_LOOK_SECONDS = 0.02


class EdgeServer:
    """Serves ``/v1/ws``.

    Args:
        door: knows the API keys.
        intake: puts requests into the pipeline.
        streams: for offsets and single reads.
        hub: started and stopped by the caller.
    """

    def __init__(
        self, settings: Settings, door: Door, intake: Intake, streams: StreamStore, hub: StreamHub
    ) -> None:
        edge = settings.edge
        self._edge = edge
        self._max_body_bytes = settings.http.max_body_bytes
        limits = SessionLimits(
            max_body_bytes=settings.http.max_body_bytes,
            max_streams=edge.max_streams_per_socket,
            frames_per_second=edge.frames_per_second,
            auth_timeout_seconds=edge.auth_timeout_seconds,
        )
        self._parts = EdgeParts(door, intake, streams, hub, limits, edge.send_timeout_seconds)
        self._sockets: set[Socket] = set()
        # Weak: a connection may be lost between its headers and its handler.
        self._principals: WeakKeyDictionary[ServerConnection, Principal] = WeakKeyDictionary()
        self._closing: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._draining = False
        self._server: Server | None = None

    async def start(self, listener: sockets.socket | None = None) -> None:
        """Accept connections on ``listener``, or on the configured address.

        Raises:
            OSError: the address is taken.
        """
        where: dict[str, Any] = {"host": self._edge.host, "port": self._edge.port}
        self._server = await serve(
            self._handle,
            **(where if listener is None else {"sock": listener}),
            backlog=BACKLOG,
            process_request=self._process_request,
            compression=None,  # text frames are small: compressing halves what a core serves
            max_size=self._max_body_bytes * _OVERSIZE_READ,
            max_queue=_FRAMES_WAITING,
            ping_interval=PING_INTERVAL_SECONDS,
            ping_timeout=PING_INTERVAL_SECONDS,
            close_timeout=CLOSE_TIMEOUT_SECONDS,
            server_header=None,
        )
        self._watch = asyncio.create_task(self._watch_sockets(), name="edge-watch")

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None
        return int(next(iter(self._server.sockets)).getsockname()[1])

    def not_ready(self) -> str | None:
        """Why no socket can be opened right now, or None."""
        if self._server is None or not self._server.is_serving():
            return "not listening"
        return "full" if len(self._sockets) >= self._edge.max_sockets else None

    async def drain(self, grace_seconds: float) -> None:
        """Close every socket with "reconnect at your offset", after what was just asked for is accepted.

        Replies go on without us: clients read the rest from another edge, or from this one's successor. A
        client that does not answer the close gets the rest of the grace time to do so. May be cancelled.
        """
        if self._server is None:
            return
        self._draining = True
        self._server.close(close_connections=False)
        closing = [asyncio.create_task(self._send_away(s, grace_seconds)) for s in self._sockets]
        if closing:
            await asyncio.wait(closing)

    def send_away(self, principals: Container[Principal]) -> None:
        """Close the sockets of these principals with "reconnect at your offset".

        Whoever still has a key comes in again, as what the key stands for now.
        """
        for socket in self._sockets:
            if socket.session.principal in principals:
                self._close_apart(self._send_away(socket, 0.0))

    async def _send_away(self, socket: Socket, grace_seconds: float) -> None:
        socket.session.draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_seconds
        while True:
            if not socket.session.creating or loop.time() >= deadline:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        await socket.close(CloseCase.RESTART, max(_FAREWELL_SECONDS, deadline - loop.time()))

    async def stop(self) -> None:
        """Close whatever is still open, within a second or so. Idempotent."""
        if self._watch is not None:
            await end_tasks([self._watch])
        if self._server is not None:
            await self.drain(0.0)
            await self._server.wait_closed()

    def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        path = request.path.partition("?")[0]
        if path == HEALTH_PATH:
            return _response(http.HTTPStatus.OK, b'{"status":"ok"}')
        if path != PATH:
            return _refusal(error_body(ErrorCode.NOT_FOUND, f"Websockets are served on {PATH}."))
        try:
            origin = request.headers.get("Origin")
            host = request.headers.get("Host")
            key = bearer_key(request.headers.get("Authorization"))
        except (InvalidHeader, LookupError):
            return _refusal(error_body(ErrorCode.INVALID_REQUEST, "A header is given twice."))
        if not origin_allowed(origin, host, self._edge.allowed_origins, self._edge.host):
            body = ErrorBody(message="This origin is not allowed.", type="permission_error")
            return _response(http.HTTPStatus.FORBIDDEN, _error_json(body))
        if len(self._sockets) >= self._edge.max_sockets:
            return _refusal(
                error_body(ErrorCode.UNAVAILABLE, "This server has no room for more sockets.")
            )
        if key is not None:
            try:
                self._principals[connection] = self._parts.door.authenticate(key)
            except ApiError as error:
                return _refusal(error.body)
        return None

    async def _handle(self, connection: ServerConnection) -> None:
        socket = Socket(connection, self._parts, self._principals.pop(connection, None))
        self._sockets.add(socket)
        SOCKETS.inc()
        try:
            if self._draining:  # its handshake was under way
                await self._send_away(socket, 0.0)
            await socket.run()
        finally:
            SOCKETS.dec()
            self._sockets.discard(socket)

    async def _watch_sockets(self) -> None:
        """One look at all sockets now and then, instead of a timer for each thing that may take too long."""
        interval = min(_WATCH_SECONDS, self._edge.send_timeout_seconds, self._edge.auth_timeout_seconds)
        while True:
            await asyncio.sleep(interval)
            for socket in list(self._sockets):
                case = socket.overdue()
                if case is not None and not socket.closing:
                    self._close_apart(socket.close(case))

    def _close_apart(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _error_json(body: ErrorBody) -> bytes:
    return orjson.dumps({"error": body.model_dump()})


def _refusal(body: ErrorBody) -> Response:
    return _response(http.HTTPStatus(body.status), _error_json(body))


def _response(status: http.HTTPStatus, body: bytes) -> Response:
    headers = Headers(
        {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    )
    return Response(status.value, status.phrase, headers, body)
