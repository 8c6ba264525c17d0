"""The edge's process: connections, hub and server, in the order of their needs."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

import redis.asyncio as redis

from contracts.identity import Principal
from infra.kafka import Publisher
from infra.presence_redis import ReaderPresence
from infra.settings import Settings
from infra.stream_redis import RedisTokenStreams, connect

from .hub import Hub
from .protocols import Door, Intake
from .server_websockets import EdgeServer


class OpenIntake(Intake, Protocol):
    """An intake that must be closed before what it was made of."""

    def reconfigure(self, settings: Settings) -> None:
        """Go by these settings from the next request on."""

    async def close(self) -> None:
        """Finish what has begun, then let go."""


class LiveDoor(Door, Protocol):
    """A door whose keys can change."""

    def reconfigure(self, settings: Settings) -> frozenset[Principal]:
        """Go by the keys of these settings from now on; returns those whose keys are no longer the same."""


MakeDoor = Callable[[Settings], LiveDoor]
MakeIntake = Callable[[Settings, RedisTokenStreams, Publisher], Awaitable[OpenIntake]]


class EdgeRole:
    """See :class:`infra.role.Role`.

    Args:
        make_door / make_intake: how what is behind the edge's seams is built.
        listener: the inherited socket to serve on instead of the configured address; stays open until the
            drain, so that a start that fails can be tried again.
    """

    def __init__(
        self,
        settings: Settings,
        make_door: MakeDoor,
        make_intake: MakeIntake,
        listener: socket.socket | None = None,
    ) -> None:
        self._settings = settings
        self._inherited = listener
        self._make_intake = make_intake
        self._client: redis.Redis | None = None
        self._reader_client: redis.Redis | None = None
        self._publisher: Publisher | None = None
        self._intake: OpenIntake | None = None
        self._door = make_door(settings)
        self._hub: Hub | None = None
        self._server: EdgeServer | None = None

    async def start(self) -> None:
        settings = self._settings
        self._client = connect(settings.redis)
        self._reader_client = connect(settings.redis, blocking=True)
        streams = RedisTokenStreams(self._client, settings.streams)
        await streams.ping()
        self._publisher = Publisher(settings.kafka)
        await self._publisher.start()
        self._intake = await self._make_intake(settings, streams, self._publisher)
        presence = ReaderPresence(self._client)
        self._hub = Hub(streams, self._reader_client, settings.edge.buffer_entries, presence)
        await self._hub.start()
        self._server = EdgeServer(settings, self._door, self._intake, streams, self._hub)
        await self._server.start(self._inherited.dup() if self._inherited is not None else None)

    async def not_ready(self) -> str | None:
        if self._hub is None or self._server is None:
            return "starting"
        return self._hub.not_ready() or self._server.not_ready()

    async def drain(self) -> None:
        if self._hub is not None:
            self._hub.sending_away = True
        if self._inherited is not None:
            self._inherited.close()
        if self._server is not None:
            await self._server.drain(self._settings.drain_seconds)

    async def stop(self) -> None:
        if self._hub is not None:
            self._hub.sending_away = True
        if self._server is not None:
            await self._server.stop()
        if self._hub is not None:
            await self._hub.stop()
        if self._intake is not None:
            await self._intake.close()
        if self._publisher is not None:
            await self._publisher.stop()
        for client in (self._client, self._reader_client):
            if client is not None:
                await client.aclose()

    def reconfigure(self, settings: Settings) -> None:
        """See :class:`infra.role.Role`. Sockets whose key is gone, or of another tier now, come again."""
        self._settings = settings
        changed = self._door.reconfigure(settings)
        if self._intake is not None:
            self._intake.reconfigure(settings)
        if self._server is not None:
            self._server.send_away(changed)

    async def run(self) -> None:
        assert self._hub is not None
        await self._hub.run()
