"""A TCP proxy for tests: a stable address whose target, delay and connections are in the test's hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from infra.embedded import LOOPBACK


class TcpProxy:
    """Passes bytes on, each way ``delay_seconds`` later and in order.

    Attributes:
        target: port of new connections; those that are open stay where they are.
        delay_seconds: of every chunk that arrives from now on, each way.
        made: connections accepted so far.
        before: called with what a client has sent, before that is passed on.
        instead: called with what a server has sent and where to; passes on itself what it likes.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay_seconds = 0.0
        self.made = 0
        self.before: Callable[[bytes], Awaitable[None]] | None = None
        self.instead: Callable[[bytes, asyncio.StreamWriter], Awaitable[None]] | None = None
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://{LOOPBACK}:{self._server.sockets[0].getsockname()[1]}/0"

    def cut(self) -> None:
        """Break every open connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.made += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self.target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            ways = [self._pass(reader, far_writer, from_client=True), self._pass(far_reader, writer)]
            await asyncio.wait([asyncio.ensure_future(w) for w in ways], return_when="FIRST_COMPLETED")
        finally:
            for end in ends:
                end.transport.abort()
            self._writers -= ends

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_client: bool = False
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await reader.read(65_536):
                if from_client and self.before is not None:
                    await self.before(data)
                if not from_client and self.instead is not None:
                    await self.instead(data, writer)
                elif self.delay_seconds:
                    loop.call_later(self.delay_seconds, _write, writer, data)
                else:
                    _write(writer, data)
        except OSError:
            return


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.transport.is_closing():
        writer.write(data)


@asynccontextmanager
async def tcp_proxy(target: int) -> AsyncIterator[TcpProxy]:
    """A proxy to a port of the loopback, for the length of a block."""
    proxy = TcpProxy(target)
    server = await asyncio.start_server(proxy._connected, LOOPBACK, 0)
    proxy._server = server
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
