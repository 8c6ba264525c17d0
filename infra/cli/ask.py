"""``headrace ask``: a reply in the terminal, over the websocket, across dropped connections."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from ..settings import DEV_PAID_KEY
from ..stack.errors import StackError
from ..stack.state import state_to_call
from .ask_session import STOP_CLOSE_CODES, AskSession, Ended, Progress, ReplyText

#: Without any contact for so long, asking ends.
_GIVE_UP_SECONDS = 60.0
_FIRST_CONNECT_SECONDS = 10.0
_CANCEL_SECONDS = 3.0
_LONGEST_WAIT_SECONDS = 2.0


def ask(
    question: str,
    *,
    data_dir: Path,
    url: str | None,
    key: str,
    model: str,
    max_tokens: int | None,
    temperature: float | None,
) -> int:
    """Ask and print the reply; returns 0 when it was completed, 130 when cancelled by Ctrl-C.

    Raises:
        StackError: there is nobody to ask, or the connection is lost for good.
    """
    if url is None:
        url = state_to_call(data_dir, "--url").ws_url
    session = AskSession(question, model, max_tokens, temperature)
    return asyncio.run(_with_interrupt(_Conversation(session, url, key)))


async def ask_stack(ws_url: str, question: str) -> None:
    """Ask the development stack that this process runs; what goes wrong is printed, not raised."""
    _say(f"\n> {question}")
    try:
        session = AskSession(question, "default", None, temperature=0)
        await _Conversation(session, ws_url, DEV_PAID_KEY).run()
    except StackError as error:
        _say(str(error))


async def _with_interrupt(conversation: _Conversation) -> int:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, conversation.interrupted.set)
    return await conversation.run()


class _Conversation:
    """The session's I/O."""

    def __init__(self, session: AskSession, url: str, key: str) -> None:
        self.interrupted = asyncio.Event()
        self._session = session
        self._url = url
        self._key = key
        self._terminal = sys.stderr.isatty()
        self._state_shown = False

    async def run(self) -> int:
        interrupt = asyncio.ensure_future(self.interrupted.wait())
        reading = asyncio.ensure_future(self._until_ended())
        try:
            await asyncio.wait({interrupt, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                # _until_ended sends the cancellation itself, where there is a connection.
                await asyncio.wait({reading}, timeout=_CANCEL_SECONDS)
            if not reading.done():
                self._clear_state()
                _say("\nstopped reading; the cancellation was not confirmed")
                return 130
            return self._conclude(reading.result())
        finally:
            for task in (interrupt, reading):
                task.cancel()
            await asyncio.gather(interrupt, reading, return_exceptions=True)

    def _conclude(self, ended: Ended) -> int:
        self._clear_state()
        sys.stdout.write("\n")
        sys.stdout.flush()
        figures = self._session.figures()
        if ended.status == "completed":
            _say(figures)
            return 0
        said = ended.status if ended.message is None else f"{ended.status}: {ended.message}"
        _say(said + (f" ({figures})" if figures else ""))
        return 130 if ended.status == "cancelled" and self.interrupted.is_set() else 1

    async def _until_ended(self) -> Ended:
        wait = 0.1
        contact = time.monotonic()
        limit = _FIRST_CONNECT_SECONDS
        while True:
            try:
                async with connect(self._url, open_timeout=5, max_size=None) as socket:
                    limit = _GIVE_UP_SECONDS
                    for frame in self._session.opening(self._key, time.monotonic()):
                        await socket.send(json.dumps(frame))
                    contact, wait = time.monotonic(), 0.1
                    return await self._read(socket)
            except ConnectionClosed as error:
                reason: Exception = error
                closed = error.rcvd
                if closed is not None and closed.code in STOP_CLOSE_CODES:
                    raise StackError(f"the server closed the connection: {closed.reason}") from None
            except InvalidURI:
                raise StackError(f"{self._url} is no websocket URL") from None
            except (OSError, TimeoutError, InvalidHandshake) as error:
                reason = error
            if self.interrupted.is_set() or time.monotonic() - contact > limit:
                raise StackError(f"no connection to {self._url}: {reason}")
            self._show_state("reconnecting" if self._session.request_id else "connecting")
            await asyncio.sleep(wait)
            wait = min(wait * 2, _LONGEST_WAIT_SECONDS)

    async def _read(self, socket: ClientConnection) -> Ended:
        cancelling = asyncio.ensure_future(self._cancel_when_interrupted(socket))
        try:
            async for message in socket:
                shown = self._session.receive(_frame(message), time.monotonic())
                if isinstance(shown, Ended):
                    return shown
                if isinstance(shown, Progress):
                    self._show_state(shown.status)
                elif isinstance(shown, ReplyText):
                    self._clear_state()
                    sys.stdout.write(shown.text)
                    sys.stdout.flush()
            # The iteration ends without an error when the server closes normally: it goes away.
            raise ConnectionError("the server went away")
        finally:
            cancelling.cancel()
            await asyncio.gather(cancelling, return_exceptions=True)

    async def _cancel_when_interrupted(self, socket: ClientConnection) -> None:
        await self.interrupted.wait()
        frame = self._session.cancel()
        if frame is not None:
            await socket.send(json.dumps(frame))

    def _show_state(self, text: str) -> None:
        if self._terminal:
            sys.stderr.write(f"\r\x1b[2K\x1b[2m{text} …\x1b[0m")
            sys.stderr.flush()
            self._state_shown = True

    def _clear_state(self) -> None:
        if self._state_shown:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
            self._state_shown = False


def _frame(message: str | bytes) -> dict[str, Any]:
    try:
        frame = json.loads(message)
    except ValueError:
        return {}
    return frame if isinstance(frame, dict) else {}


def _say(text: str) -> None:
    if text:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
