"""A scripted stand-in for gateway and edge, for the faults that the real ones cannot be made to show.

One port serves the page (with the gateway's content security policy) and the websocket. Streams outlive
sockets, as in the real thing: a socket that subscribes after an offset gets the rest.
"""

from __future__ import annotations

import asyncio
import json
import mimetypes
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

STATIC = Path(__file__).resolve().parents[2] / "streaming_edge" / "static"
CSP = (
    "default-src 'self'; connect-src 'self' ws: wss:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
KEY = "sk-headrace-dev"
SEAL = f"{2**64 - 1}-{2**64 - 1}"
Frame = dict[str, Any]


def offset_key(offset: str | None) -> tuple[int, int]:
    if offset is None:
        return (0, 0)
    attempt, token = offset.split("-")
    return int(attempt), int(token)


def progress(*statuses: str) -> list[Frame]:
    """The first status frames of a stream, at their offsets."""
    offsets = {"accepted": "0-1", "moderated": "0-2", "dispatched": "0-3", "started": "1-0"}
    return [{"type": "stream.status", "offset": offsets[s], "status": s} for s in statuses]


def texts(pieces: list[str], attempt: int = 1, first: int = 1) -> list[Frame]:
    return [
        {"type": "stream.text", "offset": f"{attempt}-{n}", "index": 0, "text": piece}
        for n, piece in enumerate(pieces, first)
    ]


def ended(status: str = "completed", tokens: int | None = None, **fields: Any) -> Frame:
    usage = (
        None
        if tokens is None
        else {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": tokens + 7}
    )
    reason = "stop" if status == "completed" else None
    return {
        "type": "stream.end",
        "offset": SEAL,
        "status": status,
        "finish_reason": reason,
        "usage": usage,
        "error": None,
        **fields,
    }


def whole(pieces: list[str]) -> list[Frame]:
    """A reply that goes well."""
    return [
        *progress("accepted", "moderated", "dispatched", "started"),
        *texts(pieces),
        ended(tokens=len(pieces)),
    ]


def error(code: str, message: str) -> Frame:
    return {"message": message, "type": "invalid_request_error", "param": None, "code": code}


@dataclass
class FakeStream:
    """One request: what its script still holds, and what is out."""

    request_id: str
    script: list[Frame]
    out: list[Frame] = field(default_factory=list)
    grown: asyncio.Condition = field(default_factory=asyncio.Condition)


class FakeEdge:
    """Settings may be changed at any time.

    Attributes:
        script: the frames of the next replies (without request id), or an ``error`` to refuse them.
        pace: seconds between two frames of a script.
        hold_at: index of the script's frame before which every reply waits for :meth:`release`.
        silent: nothing that comes in is answered.
        dead: sockets on which nothing that comes in is answered, and nothing is sent any more.
        refusing: new sockets are turned away with 503.
        repeats: frames before ``after`` that a subscription gets once more.
        subscribe_error: answer to the next subscription, once.
        received: every frame that came in.
    """

    def __init__(self) -> None:
        self.script: list[Frame] | Frame = whole(["Hello", " there."])
        self.pace = 0.01
        self.hold_at: int | None = None
        self.silent = False
        self.dead: set[ServerConnection] = set()
        self.refusing = False
        self.repeats = 0
        self.subscribe_error: Frame | None = None
        self.received: list[Frame] = []
        self.streams: dict[str, FakeStream] = {}
        self.sockets: set[ServerConnection] = set()
        self._go = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def frames(self, kind: str) -> list[Frame]:
        return [f for f in self.received if f["type"] == kind]

    def release(self, until: int | None = None) -> None:
        """Let held replies go on, to the end or to another frame of their script."""
        self.hold_at = until
        self._go.set()

    def drop(self) -> None:
        """Cut every socket, without a close frame."""
        for socket in list(self.sockets):
            socket.transport.abort()

    async def close_all(self, code: int, reason: str = "") -> None:
        for socket in list(self.sockets):
            await socket.close(code, reason)

    async def __aenter__(self) -> FakeEdge:
        self._server = await serve(
            self._socket, "127.0.0.1", 0, process_request=self._http, ping_interval=None
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        for task in self._tasks:
            task.cancel()
        self.drop()
        self._server.close()
        await self._server.wait_closed()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

    # -- http

    def _http(self, connection: ServerConnection, request: Request) -> Response | None:
        path = request.path.partition("?")[0]
        if path == "/v1/ws":
            return (
                _response(HTTPStatus.SERVICE_UNAVAILABLE, b"", "text/plain") if self.refusing else None
            )
        if path == "/chat/config.json":
            config = {"ws_url": f"ws://127.0.0.1:{self.port}/v1/ws", "model": "default"}
            return _response(HTTPStatus.OK, json.dumps(config).encode(), "application/json")
        file = STATIC / ("index.html" if path == "/" else Path(path).name)
        if not file.is_file():
            return _response(HTTPStatus.NOT_FOUND, b"", "text/plain")
        return _response(HTTPStatus.OK, file.read_bytes(), mimetypes.guess_type(file)[0] or "text/plain")

    # -- websocket

    async def _socket(self, socket: ServerConnection) -> None:
        self.sockets.add(socket)
        reading: set[str] = set()
        answers: dict[str, Callable[[Frame], Awaitable[None]]] = {
            "chat.create": lambda f: self._create(socket, reading, f),
            "stream.subscribe": lambda f: self._subscribe(socket, reading, f),
            "chat.cancel": lambda f: self._cancel(f["request_id"]),
            "ping": lambda _: _send(socket, {"type": "pong"}),
        }
        try:
            async for message in socket:
                frame = json.loads(message)
                self.received.append(frame)
                if frame["type"] == "auth":
                    if frame["api_key"] != KEY:
                        bad = error("invalid_api_key", "This API key is not known.")
                        await _send(socket, {"type": "error", "error": bad})
                        await socket.close(4401)
                elif not self.silent and socket not in self.dead:
                    await answers[frame["type"]](frame)
        except ConnectionClosed:
            pass
        finally:
            self.sockets.discard(socket)

    async def _create(self, socket: ServerConnection, reading: set[str], frame: Frame) -> None:
        if isinstance(self.script, dict):
            await _send(socket, {"type": "error", "ref": frame["ref"], "error": self.script})
            return
        request_id = f"chatcmpl-{len(self.streams):032x}"
        stream = FakeStream(request_id, [{**f, "request_id": request_id} for f in self.script])
        self.streams[request_id] = stream
        await _send(socket, {"type": "chat.accepted", "ref": frame["ref"], "request_id": request_id})
        self._spawn(self._produce(stream))
        reading.add(request_id)
        self._spawn(self._pump(socket, reading, stream, 0))

    async def _subscribe(self, socket: ServerConnection, reading: set[str], frame: Frame) -> None:
        request_id = frame["request_id"]
        if self.subscribe_error is not None:
            answer, self.subscribe_error = self.subscribe_error, None
            await _send(socket, {"type": "error", "request_id": request_id, "error": answer})
        elif request_id not in reading:
            reading.add(request_id)
            stream = self.streams[request_id]
            after = offset_key(frame["after"])
            seen = sum(offset_key(f["offset"]) <= after for f in stream.out)
            self._spawn(self._pump(socket, reading, stream, max(0, seen - self.repeats)))

    async def _cancel(self, request_id: str) -> None:
        stream = self.streams[request_id]
        stream.script.clear()
        if not stream.out or stream.out[-1]["type"] != "stream.end":
            tokens = sum(f["type"] == "stream.text" for f in stream.out)
            await _emit(stream, {**ended("cancelled", tokens), "request_id": request_id})

    async def _produce(self, stream: FakeStream) -> None:
        total = len(stream.script)
        while stream.script:
            if total - len(stream.script) == self.hold_at:
                self._go.clear()
                await self._go.wait()
            elif self.pace:
                await asyncio.sleep(self.pace)
            if stream.script:
                await _emit(stream, stream.script.pop(0))

    async def _pump(
        self, socket: ServerConnection, reading: set[str], stream: FakeStream, position: int
    ) -> None:
        while True:
            async with stream.grown:
                while len(stream.out) <= position:
                    await stream.grown.wait()
            frame = stream.out[position]
            try:
                await _send(socket, frame)
            except ConnectionClosed:
                return
            if frame["type"] == "stream.end":
                reading.discard(stream.request_id)
                return
            position += 1


async def _emit(stream: FakeStream, frame: Frame) -> None:
    async with stream.grown:
        stream.out.append(frame)
        stream.grown.notify_all()


async def _send(socket: ServerConnection, frame: Frame) -> None:
    await socket.send(json.dumps(frame))


def _response(status: HTTPStatus, body: bytes, content_type: str) -> Response:
    headers = Headers(
        {
            "Content-Type": content_type,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": CSP,
            "Cache-Control": "no-store",
            "Connection": "close",
        }
    )
    return Response(status.value, status.phrase, headers, body)
