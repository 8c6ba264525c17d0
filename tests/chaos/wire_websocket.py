"""One websocket of a client that reads one stream. No retry here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import websockets
from websockets.asyncio.client import ClientConnection

from contracts.stream_ids import StreamId

from .ledger import End
from .wire import Accepted, Cut, Event, Network, Status, Text, said


class Socket:
    """A websocket that reads one stream."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def send(self, frame: dict[str, Any]) -> None:
        """Send a frame."""
        try:
            await self._connection.send(json.dumps(frame))
        except websockets.ConnectionClosed as error:
            raise Cut("closed") from error

    async def events(self) -> AsyncIterator[Event]:
        """What comes, until the stream's end."""
        while True:
            try:
                frame = json.loads(await self._connection.recv())
            except websockets.ConnectionClosed as error:
                raise Cut(f"closed {error.rcvd.code if error.rcvd else 1006}") from error
            match frame["type"]:
                case "chat.accepted":
                    yield Accepted(frame["request_id"])
                case "stream.text":
                    yield Text(StreamId.parse(frame["offset"]), frame["index"], frame["text"])
                case "stream.status":
                    yield Status(StreamId.parse(frame["offset"]))
                case "stream.end":
                    error_body = frame.get("error") or {}
                    usage = frame["usage"]["completion_tokens"]
                    yield End(frame["status"], error_body.get("code"), usage)
                    return
                case "error":
                    raise said(frame["error"])

    def abort(self) -> None:
        """Drop the connection without a word."""
        self._connection.transport.abort()


@asynccontextmanager
async def socket(network: Network, key: str) -> AsyncIterator[Socket]:
    """An authenticated websocket."""
    try:
        connection = await websockets.connect(
            network.ws_url,
            additional_headers={"Authorization": f"Bearer {key}"},
            compression=None,
            max_size=None,
            open_timeout=8,
            close_timeout=1,
            ping_interval=5,
            ping_timeout=10,
        )
    except (
        OSError,
        TimeoutError,
        websockets.InvalidHandshake,
        websockets.ConnectionClosed,
        EOFError,
    ) as error:
        raise Cut(type(error).__name__) from error
    try:
        yield Socket(connection)
    finally:
        connection.transport.abort()
