"""The gateway as a role: what it connects to, when it is ready, how it leaves."""

from __future__ import annotations

import logging
from typing import Final

from contracts.token_stream import StreamsUnavailable
from infra.kafka import Publisher, PublishError
from infra.pipeline_health import pipeline_not_ready
from infra.presence_redis import ReaderPresence
from infra.settings import Settings
from infra.stream_redis import RedisTokenStreams, connect
from streaming_edge.hub import Hub

from .gateway_fastapi import make_app
from .http_server import HttpServer, listen
from .replies import Replies
from .wiring import WiredIntake, make_door, make_intake

log = logging.getLogger(__name__)

#: Time for replies that are told to go on elsewhere to say so.
_FAREWELL_SECONDS: Final = 1.0


class GatewayRole:
    """Implements :class:`infra.role.Role`."""

    def __init__(self, settings: Settings, host: str | None = None, port: int | None = None) -> None:
        self._settings = settings
        self._host = host if host is not None else settings.http.host
        self._port = port if port is not None else settings.http.port
        self._client = connect(settings.redis)
        self._reader_client = connect(settings.redis, blocking=True)
        self._streams = RedisTokenStreams(self._client, settings.streams)
        self._publisher = Publisher(settings.kafka)
        presence = ReaderPresence(self._client)
        self._hub = Hub(self._streams, self._reader_client, settings.edge.buffer_entries, presence)
        self._replies = Replies()
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
        self._intake = await make_intake(self._settings, self._streams, self._publisher)
        app = make_app(
            self._settings,
            door=make_door(self._settings),
            intake=self._intake,
            streams=self._streams,
            hub=self._hub,
            replies=self._replies,
            not_ready=self._cannot_answer,
        )
        timeout = self._settings.edge.send_timeout_seconds
        self._server = HttpServer(app, listen(self._host, self._port, timeout))
        self._server.start()
        log.info("serving HTTP", extra={"host": self._host, "port": self._server.port})

    async def not_ready(self) -> str | None:
        """See :class:`infra.role.Role`."""
        if self._replies.draining:
            return "draining"
        try:
            await self._streams.ping()
        except StreamsUnavailable:
            return "Redis does not answer"
        try:
            await self._publisher.ping()
        except PublishError:
            return "Kafka does not answer"
        return self._hub.not_ready()

    async def _cannot_answer(self) -> str | None:
        """What the public ``/readyz`` says: why a request accepted now might not be answered soon."""
        return await self.not_ready() or await pipeline_not_ready(self._client, self._settings)

    async def drain(self) -> None:
        """New requests are refused, replies get the grace time, then they are sent elsewhere."""
        self._replies.draining = True
        if not await self._replies.wait_empty(self._settings.drain_seconds):
            self._hub.sending_away = True
            self._replies.end_all()
            await self._replies.wait_empty(_FAREWELL_SECONDS)

    async def stop(self) -> None:
        """See :class:`infra.role.Role`."""
        self._replies.draining = True
        if self._server is not None:
            await self._server.stop()
        if self._intake is not None:
            await self._intake.close()
        await self._hub.stop()
        await self._publisher.stop()
        await self._reader_client.aclose()
        await self._client.aclose()

    async def run(self) -> None:
        """See :class:`infra.role.Role`."""
        assert self._server is not None
        await self._server.wait()
