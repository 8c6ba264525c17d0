"""A Faust app the way Headrace uses it: embedded, raw bytes, prompt fetches, and ordered acknowledgement."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import aiokafka
import faust
from faust.transport.drivers import aiokafka as driver

from infra.commit_alarm import POSITIONS_NOT_COMMITTED, CommitAlarm
from infra.doorbell import fetch_when_rung
from infra.kafka import POLL_INTERVAL_MS
from infra.kafka_watch import until_stalled
from infra.settings import KafkaSettings
from infra.tasks import end_tasks

log = logging.getLogger(__name__)

#: Records handled at the same time by one process.
WINDOW = 32


class Incoming(Protocol):
    """A Kafka record as a handler sees it (the fields ``Publisher.dead_letter`` needs, and headers)."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Any: ...


Handler = Callable[[Incoming], Awaitable[None]]


class _PromptConsumerThread(driver.AIOKafkaConsumerThread):
    """Faust hard-codes a fetch wait of 1.5 s, which the embedded broker sits out on every hop."""

    def _create_worker_consumer(self, transport: Any) -> aiokafka.AIOKafkaConsumer:
        consumer = super()._create_worker_consumer(transport)
        # Read by aiokafka when the consumer starts, which is after this. There is no public way; the
        # assertion makes a renamed attribute a failure to start rather than a slow pipeline.
        assert isinstance(consumer._fetch_max_wait_ms, int)
        kafka = cast(StageApp, self.app).kafka
        consumer._fetch_max_wait_ms = kafka.fetch_max_wait_ms
        if kafka.doorbells is not None:
            fetch_when_rung(consumer, kafka.doorbells)
        return consumer


class _PromptConsumer(driver.Consumer):
    def _new_consumer_thread(self) -> driver.AIOKafkaConsumerThread:
        return _PromptConsumerThread(self, loop=self.loop, beacon=self.beacon)

    def _filter_committable_offsets(self, tps: Iterable[Any]) -> dict[Any, int]:
        """What Faust is about to commit. Should that fail it crashes the app, or waits in there for ever."""
        due: dict[Any, int] = super()._filter_committable_offsets(tps)
        alarm = cast(StageApp, self.app).alarm
        if due:
            alarm.tried()
        else:
            alarm.settled()
        return due

    async def _commit(self, offsets: Mapping[Any, int]) -> bool:
        done = bool(await super()._commit(offsets))
        if done:
            cast(StageApp, self.app).alarm.settled()
        return done


class _PromptTransport(driver.Transport):
    Consumer = _PromptConsumer


class StageApp(faust.App):
    """A Faust app that reads one topic and hands each record to one handler.

    Delivery: at least once. Up to :data:`WINDOW` records are handled at once; a record is acknowledged
    only after every earlier one of its partition, so Faust, which commits past gaps, never sees one.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        app_id: str,
        topic: str,
        handler: Handler,
    ) -> None:
        """Prepare; nothing connects before :meth:`start`.

        Args:
            app_id: consumer group.
            topic: must exist already.
            handler: raises nothing but ``CancelledError``; anything else ends the app.
        """
        self.kafka = settings
        self.alarm = CommitAlarm(settings.stall_seconds)
        self._scratch = tempfile.TemporaryDirectory(prefix="headrace-faust-")
        super().__init__(
            app_id,
            broker=[f"kafka://{server.strip()}" for server in settings.bootstrap.split(",")],
            store="memory://",
            datadir=Path(self._scratch.name) / "data",
            web_enabled=False,
            topic_allow_declare=True,
            topic_disable_leader=True,
            topic_partitions=settings.partitions,
            topic_replication_factor=settings.replication_factor,
            broker_session_timeout=settings.session_timeout_ms / 1000,
            broker_heartbeat_interval=max(0.3, settings.session_timeout_ms / 5000),
            broker_request_timeout=max(settings.request_timeout_ms, settings.session_timeout_ms + 1_000)
            / 1000,
            broker_commit_interval=1.0,
            broker_max_poll_interval=POLL_INTERVAL_MS / 1000,
            consumer_max_fetch_size=8 * 1024 * 1024,
            stream_wait_empty=False,
        )
        self.window = OrderedWindow(handler)
        source = self.topic(
            topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw"
        )
        self.agent(source, name=f"{app_id}-agent")(self._consume)

    async def _consume(self, stream: Any) -> None:
        async for event in stream.noack().events():
            await self.alarm.until_off()
            await self.window.add(event.message, event.ack)

    def _new_transport(self) -> driver.Transport:
        return _PromptTransport(self.conf.broker_consumer, self)

    def not_ready(self) -> str | None:
        """Why no records are handled right now."""
        if not self.started or not self.consumer.assignment():
            return "no partitions"
        return POSITIONS_NOT_COMMITTED if self.alarm.is_on() else None

    async def until_broken(self) -> None:
        """Return when the app has crashed or stopped, its handler has raised, or it takes no records."""
        waits: list[asyncio.Task[Any]] = [
            asyncio.ensure_future(self.wait_until_stopped()),
            asyncio.ensure_future(self.window.failed.wait()),
            asyncio.ensure_future(until_stalled(self._positions, self._ends, self.kafka.stall_seconds)),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(waits)

    async def _positions(self) -> dict[aiokafka.TopicPartition, int | None]:
        if self.window.is_full or self.alarm.is_on():
            return {}
        return {tp: await self.consumer.position(tp) for tp in self.consumer.assignment()}

    async def _ends(self, partitions: Iterable[aiokafka.TopicPartition]) -> Mapping[Any, int]:
        return await self.consumer.highwaters(*partitions)

    async def close(self, grace_seconds: float) -> None:
        """Let what is in hand finish, acknowledge it, and leave the group."""
        await self.window.close(grace_seconds)
        if self.started:
            await self.stop()
        self._scratch.cleanup()


class OrderedWindow:
    """Handles several records at once and acknowledges them in the order they were taken.

    A record whose handler takes long (Redis is away) holds back the acknowledgement of the later ones of
    its partition, and, when the window is full, the taking of more.
    """

    def __init__(self, handler: Handler, size: int = WINDOW) -> None:
        self._handler = handler
        self._room = asyncio.Semaphore(size)
        self._open: dict[int, deque[tuple[asyncio.Task[None], Callable[[], object]]]] = {}
        self._failure: BaseException | None = None
        self.failed = asyncio.Event()

    @property
    def failure(self) -> BaseException | None:
        """What a handler raised against its contract; nothing more is acknowledged after that."""
        return self._failure

    @property
    def in_hand(self) -> int:
        """Records taken and not acknowledged."""
        return sum(map(len, self._open.values()))

    @property
    def is_full(self) -> bool:
        """Whether the next record would have to wait."""
        return self._room.locked()

    async def add(self, record: Incoming, acknowledge: Callable[[], object]) -> None:
        """Start handling a record; waits while the window is full."""
        await self._room.acquire()
        task = asyncio.ensure_future(self._handler(record))
        line = self._open.setdefault(record.partition, deque())
        line.append((task, acknowledge))
        task.add_done_callback(lambda _: self._settle(line))

    def _settle(self, line: deque[tuple[asyncio.Task[None], Callable[[], object]]]) -> None:
        while line and line[0][0].done() and self._failure is None:
            task, acknowledge = line.popleft()
            self._room.release()
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is not None:
                self._failure = error
                self.failed.set()
                return
            acknowledge()

    async def close(self, grace_seconds: float) -> None:
        """Wait for what is in hand, then cancel it; cancelled records stay unacknowledged."""
        tasks = [task for line in self._open.values() for task, _ in line if not task.done()]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=grace_seconds)
        await end_tasks(late)
