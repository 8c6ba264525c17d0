"""A websocket edge on a real Redis, with what is behind its seams made by hand."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as ws_connect

from contracts.entries import Accepted, Moderated, Started, Terminal, Text
from contracts.errors import ApiError, ErrorCode
from contracts.identity import Principal, is_request_id, make_request_id
from contracts.limits import Admission
from contracts.records import Usage
from contracts.stream_ids import MODERATED, StreamId
from contracts.tiers import FinishReason, Status
from infra.presence_redis import ReaderPresence
from infra.settings import Settings, development, parse
from infra.stream_redis import RedisTokenStreams, connect
from streaming_edge.hub import Hub
from streaming_edge.server_websockets import EdgeServer

KEYS = {"sk-me": Principal("k1", "me", "paid"), "sk-you": Principal("k2", "you", "free")}
USAGE = Usage(prompt_tokens=3, completion_tokens=5)


class FakeDoor:
    def authenticate(self, api_key: str) -> Principal:
        if api_key not in KEYS:
            raise ApiError(ErrorCode.INVALID_API_KEY, "Incorrect API key.")
        return KEYS[api_key]


class FakeIntake:
    """Accepts what has messages; ``gate`` holds acceptances back until it is set."""

    def __init__(self, streams: RedisTokenStreams) -> None:
        self.streams = streams
        self.gate = asyncio.Event()
        self.gate.set()

    async def accept(
        self,
        principal: Principal,
        body: object,
        *,
        traceparent: str | None = None,
        idempotency_key: str | None = None,
    ) -> Admission:
        await self.gate.wait()
        if not isinstance(body, dict) or not body.get("messages"):
            raise ApiError(ErrorCode.INVALID_VALUE, "Give messages.", param="messages")
        return Admission(await self.create(principal))

    async def create(self, principal: Principal) -> str:
        request_id = make_request_id(1, secrets.token_bytes(10))
        accepted = Accepted(tenant=principal.tenant, tier="paid", model="m", created_ms=1)
        await self.streams.create(request_id, accepted)
        return request_id

    async def cancel(self, principal: Principal, request_id: str) -> None:
        await self._owned(principal, request_id)
        await self.streams.seal(request_id, Terminal(status=Status.CANCELLED))

    async def authorize(self, principal: Principal, request_id: str) -> None:
        await self._owned(principal, request_id)
        if (await self.streams.last_ids([request_id]))[0] is None:
            raise ApiError(ErrorCode.STREAM_EXPIRED, "The stream has expired.")

    async def _owned(self, principal: Principal, request_id: str) -> None:
        owner = await self.streams.owner(request_id) if is_request_id(request_id) else None
        if owner is None or owner.tenant != principal.tenant:
            raise ApiError(ErrorCode.NOT_FOUND, "There is no such request.")


class Client:
    """A websocket that speaks our frames."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, kind: str, **fields: Any) -> None:
        await self.connection.send(json.dumps({"type": kind, **fields}))

    async def recv(self, seconds: float = 10.0) -> dict[str, Any]:
        async with asyncio.timeout(seconds):
            return dict(json.loads(await self.connection.recv()))

    async def pong(self) -> list[dict[str, Any]]:
        """Ping, and everything that comes before the pong."""
        await self.send("ping")
        before = []
        while (frame := await self.recv())["type"] != "pong":
            before.append(frame)
        return before

    async def subscribe(self, request_id: str, after: str | None = None) -> None:
        await self.send("stream.subscribe", request_id=request_id, after=after)

    async def error(self) -> str:
        frame = await self.recv()
        assert frame["type"] == "error", frame
        return str(frame["error"]["code"])

    async def text_to(self, texts: int | None = None) -> tuple[str, str | None, dict[str, Any] | None]:
        """Text, last offset and end frame, up to ``texts`` text frames or the end of the stream."""
        words, offset, seen = "", None, 0
        while True:
            frame = await self.recv(20.0)
            assert frame["type"] in ("stream.status", "stream.text", "stream.end"), frame
            if frame["type"] == "stream.end":
                return words, offset, frame
            offset = frame["offset"]
            if frame["type"] == "stream.text":
                words += frame["text"]
                seen += 1
                if seen == texts:
                    return words, offset, None

    async def closed(self, seconds: float = 15.0) -> int | None:
        """The close code, once it is closed."""
        async with asyncio.timeout(seconds):
            await self.connection.wait_closed()
        return self.connection.close_code


class EdgeRig:
    """The edge, its Redis, and a writer of token streams."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.redis = connect(settings.redis)
        self.reader_redis = connect(settings.redis, blocking=True)
        self.streams = RedisTokenStreams(self.redis, settings.streams)
        self.intake = FakeIntake(self.streams)
        presence = ReaderPresence(self.redis)
        self.hub = Hub(self.streams, self.reader_redis, settings.edge.buffer_entries, presence)
        self.server = EdgeServer(settings, FakeDoor(), self.intake, self.streams, self.hub)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.server.port}/v1/ws"

    async def opened(self, key: str = "sk-me") -> str:
        return await self.intake.create(KEYS[key])

    async def write(self, request_id: str, pieces: list[str], first: int = 1, attempt: int = 1) -> None:
        items = [
            (request_id, StreamId(attempt, n), Text(piece, (n,)))
            for n, piece in enumerate(pieces, first)
        ]
        await self.streams.append(items)

    async def begin(self, request_id: str) -> None:
        started = Started(worker_id="w", model_revision="1")
        await self.streams.append(
            [(request_id, MODERATED, Moderated(prompt_tokens=3)), (request_id, StreamId(1, 0), started)]
        )

    async def finish(self, request_id: str) -> None:
        reasons = [FinishReason.STOP]
        done = Terminal(status=Status.COMPLETED, finish_reasons=reasons, usage=USAGE)
        await self.streams.seal(request_id, done)

    async def whole(self, pieces: list[str]) -> str:
        """A finished reply."""
        request_id = await self.opened()
        await self.begin(request_id)
        await self.write(request_id, pieces)
        await self.finish(request_id)
        return request_id

    @asynccontextmanager
    async def client(self, key: str | None = "sk-me", **options: Any) -> AsyncIterator[Client]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with ws_connect(
            self.url,
            additional_headers=headers,
            compression=None,
            max_queue=None,  # else frames nobody has read delay the closing handshake
            **options,
        ) as connection:
            yield Client(connection)


@asynccontextmanager
async def edge_rig(redis_url: str, **sections: dict[str, Any]) -> AsyncIterator[EdgeRig]:
    """A running edge; ``edge={...}`` and the like replace settings."""
    raw = development("sim").model_dump(mode="json")
    raw["redis"]["url"] = redis_url
    raw["edge"]["port"] = 0
    for name, values in sections.items():
        raw[name] |= values
    rig = EdgeRig(parse(raw))
    try:
        await rig.hub.start()
        await rig.server.start()
        await eventually(lambda: rig.hub.not_ready() is None)
        yield rig
    finally:
        await rig.server.stop()
        await rig.hub.stop()
        await rig.redis.aclose()
        await rig.reader_redis.aclose()


async def eventually(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait until ``condition()`` is true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
