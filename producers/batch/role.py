"""The batch runner as a role: what it connects to, when it is ready, how it leaves."""

from __future__ import annotations

import asyncio

from infra.batches_redis import Batches
from infra.file_storage_fsspec import make_file_storage
from infra.files_redis import Files
from infra.kafka import Publisher
from infra.live_settings import LiveSettings
from infra.pipeline_health import services_not_ready
from infra.role import DRAINING
from infra.settings import Settings
from infra.stream_redis import RedisTokenStreams, connect
from infra.tasks import end_tasks

from ..request_times import unix_ms
from ..wiring import WiredIntake, make_intake
from .batch_run import BatchServices
from .entrance import Entrance
from .line_runner import LineRunner
from .runner import BatchRunner
from .seal_watch import SealWatch


class BatchRunnerRole:
    """Implements :class:`infra.role.Role`.

    It has nothing to finish when it stops: what it began goes on in the pipeline, and whoever takes its
    batches in hand next finds it there.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._live = LiveSettings(settings)
        self._client = connect(settings.redis)
        self._streams = RedisTokenStreams(self._client, settings.streams)
        self._publisher = Publisher(settings.kafka)
        self._intake: WiredIntake | None = None
        self._work: asyncio.Task[None] | None = None
        self._draining = False

    async def start(self) -> None:
        """See :class:`infra.role.Role`."""
        settings = self._settings
        await self._streams.ping()
        await self._publisher.start()
        intake = self._intake = await make_intake(self._live.current, self._streams, self._publisher)
        self._live.subscribe(intake.reconfigure)
        watch = SealWatch(self._streams)
        services = BatchServices(
            batches=Batches(self._client, settings.batch),
            files=Files(self._client),
            storage=make_file_storage(settings.files),
            streams=self._streams,
            lines=LineRunner(
                lambda: self._live.current,
                intake,
                self._streams,
                watch,
                Entrance(settings.batch.unmoderated, settings.batch.entrance_share),
            ),
            slots=asyncio.Semaphore(settings.batch.in_flight),
            flush_seconds=settings.batch.flush_seconds,
            lease_seconds=settings.batch.lease_seconds,
            now_ms=unix_ms,
        )
        runner = BatchRunner(services, settings.batch.at_once)
        self._work = asyncio.create_task(self._together(watch, runner))

    async def _together(self, watch: SealWatch, runner: BatchRunner) -> None:
        parts = [asyncio.create_task(watch.run()), asyncio.create_task(runner.run())]
        try:
            await asyncio.gather(*parts)
        finally:
            await end_tasks(parts)

    async def not_ready(self) -> str | None:
        """See :class:`infra.role.Role`."""
        if self._draining:
            return DRAINING
        return await services_not_ready(self._streams, self._publisher)

    def reconfigure(self, settings: Settings) -> None:
        """See :class:`infra.role.Role`."""
        self._live.replace(settings)

    async def drain(self) -> None:
        """Give up what is in hand."""
        self._draining = True
        if self._work is not None:
            await end_tasks([self._work])

    async def stop(self) -> None:
        """See :class:`infra.role.Role`."""
        await self.drain()
        if self._intake is not None:
            await self._intake.close()
        await self._publisher.stop()
        await self._client.aclose()

    async def run(self) -> None:
        """See :class:`infra.role.Role`."""
        assert self._work is not None
        await self._work
