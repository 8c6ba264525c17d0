"""The gateway as a role: what it connects to, when it is ready, how it leaves."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final

from infra.batches_redis import Batches
from infra.file_storage_fsspec import make_file_storage
from infra.files_redis import Files
from infra.kafka import Publisher
from infra.listeners import bind_listener
from infra.live_settings import LiveSettings
from infra.pipeline_health import pipeline_not_ready, services_not_ready
from infra.presence_redis import ReaderPresence
from infra.role import DRAINING
from infra.settings import Settings
from infra.stored_replies_redis import StoredReplies
from infra.stream_redis import RedisTokenStreams, connect
from streaming_edge.hub import Hub

from .batch.routes_batches import BatchDesk
from .batch.routes_files import FileDesk
from .gateway_fastapi import make_app
from .http_server import HttpServer, drop_clients_that_take_nothing
from .moderations import ModerationDesk
from .replies import Replies
from .wiring import WiredIntake, make_conversation_desk, make_door, make_intake

log = logging.getLogger(__name__)

#: Time for replies that are told to go on elsewhere to say so.
_FAREWELL_SECONDS: Final = 1.0


class GatewayRole:
    """Implements :class:`infra.role.Role`."""

    def __init__(
        self,
        settings: Settings,
        host: str | None = None,
        port: int | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """A gateway.

        Args:
            host / port: where to serve, instead of the configured address.
            listener: the inherited socket to serve on instead; stays open until the drain, so that a start
                that fails can be tried again.
        """
        self._settings = settings
        self._live = LiveSettings(settings)
        self._inherited = listener
        self._draining = False
        self._host = host if host is not None else settings.http.host
        self._port = port if port is not None else settings.http.port
        self._client = connect(settings.redis)
        self._reader_client = connect(settings.redis, blocking=True)
        self._streams = RedisTokenStreams(self._client, settings.streams)
        self._publisher = Publisher(settings.kafka)
        presence = ReaderPresence(self._client)
        self._hub = Hub(self._streams, self._reader_client, settings.edge.buffer_entries, presence)
        self._replies = Replies()
        self._moderations = ModerationDesk(settings.moderation)
        self._intake: WiredIntake | None = None
        self._server: HttpServer | None = None

    @property
    def port(self) -> int:
        """The port it serves on, once started."""
        assert self._server is not None
        return self._server.port

    async def start(self) -> None:
        """See :class:`infra.role.Role`. Serves only when Kafka and Redis have answered."""
        await self._streams.ping()
        await self._publisher.start()
        await self._hub.start()
        intake = self._intake = await make_intake(self._live.current, self._streams, self._publisher)
        door = make_door(self._live.current)
        for part in (intake, door):
            self._live.subscribe(part.reconfigure)
        files = Files(self._client)
        app = make_app(
            self._live,
            door=door,
            intake=intake,
            streams=self._streams,
            hub=self._hub,
            replies=self._replies,
            files=FileDesk(self._live, files, make_file_storage(self._settings.files)),
            batches=BatchDesk(self._live, files, Batches(self._client, self._settings.batch)),
            kept=StoredReplies(self._client, self._settings.stored),
            conversations=make_conversation_desk(self._settings, self._client, self._streams),
            moderations=self._moderations,
            not_ready=self._cannot_answer,
        )
        inherited = self._inherited
        listener = bind_listener(self._host, self._port) if inherited is None else inherited.dup()
        drop_clients_that_take_nothing(listener, self._settings.edge.send_timeout_seconds)
        self._server = HttpServer(app, listener)
        await self._server.start()
        log.info("serving HTTP", extra={"host": self._host, "port": self._server.port})

    async def not_ready(self) -> str | None:
        """See :class:`infra.role.Role`."""
        if self._draining:
            return DRAINING
        return await services_not_ready(self._streams, self._publisher) or self._hub.not_ready()

    async def _cannot_answer(self) -> str | None:
        """What the public ``/readyz`` says: why a request accepted now might not be answered soon."""
        return await self.not_ready() or await pipeline_not_ready(self._client, self._live.current)

    def reconfigure(self, settings: Settings) -> None:
        """See :class:`infra.role.Role`."""
        self._live.replace(settings)

    async def drain(self) -> None:
        """No more connections are accepted; those that are there get the grace time to end."""
        self._draining = True
        if self._inherited is not None:
            self._inherited.close()
        if self._server is not None:
            try:
                async with asyncio.timeout(self._settings.drain_seconds):
                    await self._server.leave()
            except TimeoutError:
                log.info("grace time over", extra={"replies": self._replies.count})

    async def stop(self) -> None:
        """See :class:`infra.role.Role`. Replies that still run are sent elsewhere."""
        self._draining = self._replies.closing = True
        self._hub.sending_away = True
        self._replies.end_all()
        await self._replies.wait_empty(_FAREWELL_SECONDS)
        if self._server is not None:
            await self._server.stop()
        if self._intake is not None:
            await self._intake.close()
        self._moderations.close()
        await self._hub.stop()
        await self._publisher.stop()
        await self._reader_client.aclose()
        await self._client.aclose()

    async def run(self) -> None:
        """See :class:`infra.role.Role`."""
        assert self._server is not None
        await self._server.wait()
