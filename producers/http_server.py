"""uvicorn as a part of a role: on a socket of ours, without signal handlers of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_BACKLOG: Final = 2_048
_KEEP_ALIVE_SECONDS: Final = 75
_CLOSE_SECONDS: Final = 2
#: Request line and headers together.
MAX_HEAD_BYTES: Final = 65_536
_HEAD_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"connection: close\r\n\r\n"
    b'{"error":{"message":"The headers are too large.","type":"invalid_request_error",'
    b'"param":null,"code":"request_too_large"}}'
)


def listen(host: str, port: int, send_timeout_seconds: float) -> socket.socket:
    """A listening TCP socket.

    Connections inherit its ``TCP_USER_TIMEOUT`` (Linux): the kernel drops a client that takes nothing for
    ``send_timeout_seconds``, which no ASGI server does.

    Raises:
        OSError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(send_timeout_seconds * 1000)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    server.setblocking(False)
    return server


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with a bound on the bytes before a body: neither it nor its parser has one."""

    _head_bytes = 0
    _in_head = True
    _passed_a_head = False

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its headers are there."""
        self._in_head = False
        self._passed_a_head = True
        super().on_headers_complete()

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
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The role's process has the signals."""
        yield


class HttpServer:
    """Serves one application until it is stopped."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        config = uvicorn.Config(
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
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._listener.getsockname()[1]
        return port

    def start(self) -> None:
        """Begin to accept connections."""
        self._task = asyncio.create_task(self._server.serve([self._listener]), name="http")

    async def wait(self) -> None:
        """Return or raise when the server has ended; cancelling the wait leaves it running."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Close the listener, then every connection, after at most about two seconds. Idempotent."""
        if self._task is None:
            self._listener.close()
            return
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
