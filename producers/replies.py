"""The replies a gateway has open: noticing clients that leave, and ending replies when the gateway does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from starlette.types import Receive


class Interrupted(Exception):
    """A reply ends here although the request goes on."""


class ClientLeft(Interrupted):
    """The client closed the connection."""


class GatewayLeaving(Interrupted):
    """This gateway stops; the reply can be read on elsewhere."""


class Watch:
    """A block that is left with :class:`Interrupted` when the client or the gateway goes.

    Entered after the request's body has been read. Works as :func:`asyncio.timeout` does: the task that
    entered is cancelled, and the cancellation is turned into the exception on the way out.
    """

    def __init__(self, replies: Replies, receive: Receive) -> None:
        self._replies = replies
        self._receive = receive
        self._reason: Interrupted | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.create_task(self._until_disconnect())
        self._replies.opened(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        self._replies.closed(self)
        if self._reason is not None:
            ours = self._task.uncancel() <= self._cancelling
            if ours and kind is not None and issubclass(kind, asyncio.CancelledError):
                raise self._reason

    def interrupt(self, reason: Interrupted) -> None:
        """Leave the block with ``reason``; only the first one counts."""
        if self._reason is None:
            self._reason = reason
            self._task.cancel()

    async def _until_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientLeft())


class Replies:
    """All replies of one gateway process.

    Attributes:
        closing: no new ones are begun; one that comes all the same, on a connection that was kept open, ends
            with :class:`GatewayLeaving`.
    """

    def __init__(self) -> None:
        self.closing = False
        self._open: set[Watch] = set()
        self._accepting = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def count(self) -> int:
        """Replies that are open, and requests on their way to one."""
        return len(self._open) + self._accepting

    @contextmanager
    def accepting(self) -> Iterator[None]:
        """Around accepting a request whose reply is opened next, without an await in between."""
        self._accepting += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._accepting -= 1
            self._changed()

    def watch(self, receive: Receive) -> Watch:
        """A context manager to read one reply in."""
        return Watch(self, receive)

    def opened(self, watch: Watch) -> None:
        """Count a reply."""
        self._open.add(watch)
        self._empty.clear()
        if self.closing:
            watch.interrupt(GatewayLeaving())

    def closed(self, watch: Watch) -> None:
        """A reply has ended."""
        self._open.discard(watch)
        self._changed()

    async def wait_empty(self, seconds: float) -> bool:
        """Wait until no reply is open; False when some still are after ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                while self.count:
                    await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def end_all(self) -> None:
        """End every open reply with :class:`GatewayLeaving`."""
        for watch in list(self._open):
            watch.interrupt(GatewayLeaving())

    def _changed(self) -> None:
        if not self.count:
            self._empty.set()
