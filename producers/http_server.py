"""uvicorn as a part of a role: on a socket of ours, without signal handlers of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import uvicorn
from pydantic_core import to_json
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from contracts.errors import ErrorBody, ErrorCode, error_body

_KEEP_ALIVE_SECONDS: Final = 75
_CLOSE_SECONDS: Final = 2
#: While the server leaves, a connection that has been idle for so long is closed. At once would be wrong: a
#: request that is on its way to it would meet a closed connection, which clients do not repeat.
_QUIET_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.05
#: Request line and headers together.
MAX_HEAD_BYTES: Final = 65_536


def _last_answer(status: bytes, body: ErrorBody) -> bytes:
    """An answer that no application gives; the connection is closed after it."""
    content = to_json({"error": body.model_dump()})
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (status, len(content)) + content


_HEAD_TOO_LARGE: Final = _last_answer(
    b"431 Request Header Fields Too Large",
    error_body(ErrorCode.REQUEST_TOO_LARGE, "The headers are too large."),
)
_NOT_HTTP: Final = _last_answer(
    b"400 Bad Request",
    error_body(ErrorCode.INVALID_REQUEST, "This is not a valid HTTP/1.1 request."),
)


def drop_clients_that_take_nothing(listener: socket.socket, seconds: float) -> None:
    """Let the kernel drop a connection whose client takes nothing for so long, which no ASGI server does.

    Connections inherit the ``TCP_USER_TIMEOUT`` (Linux) of the socket they were accepted on.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


class _Config(uvicorn.Config):
    #: The server accepts no more connections: each answer is the last one on its connection.
    leaving = False


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with a bound on the bytes before a body, which neither it nor its parser has, with
    refusals in the API's shape, and with a way to leave its clients without an error.
    """

    _head_bytes = 0
    _in_head = True
    _passed_a_head = False

    @property
    def idle(self) -> bool:
        """Whether no request is being received or answered."""
        cycle = self._cycle
        return (cycle is None or cycle.response_complete) and not self._head_bytes

    def close_after_answer(self) -> None:
        """Say ``Connection: close`` with the answer under way, where its head is not out yet."""
        cycle = self._cycle
        if cycle is not None and not cycle.response_started:
            cycle.keep_alive = False

    @property
    def _cycle(self) -> RequestResponseCycle | None:
        return cast("RequestResponseCycle | None", self.cycle)  # uvicorn's annotation leaves None out

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its headers are there."""
        self._in_head = False
        self._passed_a_head = True
        super().on_headers_complete()
        if cast(_Config, self.config).leaving:
            self.close_after_answer()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser does not take; ``msg`` is about our code rather than for the client."""
        self.transport.write(_NOT_HTTP)
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Refuse what goes on for too long without its headers coming to an end."""
        was_in_head = self._in_head
        self._passed_a_head = False
        super().data_received(data)
        if not (was_in_head and self._in_head) or self._passed_a_head:
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The role's process has the signals."""
        yield


class HttpServer:
    """Serves one application until it is stopped."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self._config = _Config(
            app,
            http=BoundedHttp,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
        self._listener = listener
        self._server = _Server(self._config)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._listener.getsockname()[1]
        return port

    async def start(self) -> None:
        """Begin to accept connections; what keeps it from that is raised by :meth:`wait`."""
        self._task = asyncio.create_task(self._server.serve([self._listener]), name="http")
        accepting = asyncio.create_task(self._server.accepting.wait())
        waits: set[asyncio.Task[Any]] = {self._task, accepting}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        accepting.cancel()

    async def wait(self) -> None:
        """Return or raise when the server has ended; cancelling the wait leaves it running."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def leave(self) -> None:
        """Accept no more connections; return when those that are there have ended. May be cancelled.

        Requests that still come on them are served, each answer being the last one on its connection. A
        connection without one is closed when it has been idle for a second.
        """
        self._config.leaving = True
        if not self._server.accepting.is_set():
            return
        for server in self._server.servers:
            server.close()
        self._listener.close()
        loop = asyncio.get_running_loop()
        idle_since: dict[BoundedHttp, float] = {}
        for connection in self._connections():
            connection.close_after_answer()
        while connections := self._connections():
            now = loop.time()
            idle_since = {c: idle_since.get(c, now) for c in connections if c.idle}
            for connection, since in idle_since.items():
                if now - since >= _QUIET_SECONDS:
                    connection.transport.close()
            await asyncio.sleep(_LOOK_SECONDS)

    def _connections(self) -> list[BoundedHttp]:
        return [c for c in self._server.server_state.connections if isinstance(c, BoundedHttp)]

    async def stop(self) -> None:
        """Close the listener, then every connection, after at most about two seconds. Idempotent."""
        if self._task is None:
            self._listener.close()
            return
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
