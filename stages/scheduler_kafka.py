"""The scheduler process: queue records from Kafka, worker events from Redis, and the clock's tick."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord
from aiokafka import TopicPartition as Partition
from aiokafka.errors import KafkaError
from pydantic import ValidationError
from redis.exceptions import RedisError

from contracts.tiers import QueueClass
from contracts.token_stream import StreamsUnavailable
from infra.commit_alarm import POSITIONS_NOT_COMMITTED, CommitAlarm
from infra.kafka import Place, Publisher, Tracked, make_consumer
from infra.kafka_watch import until_stalled
from infra.open_requests_redis import OpenRequests
from infra.overload_redis import OverloadBoard
from infra.pipeline_health import DEPTH_KEY
from infra.presence_redis import ReaderPresence
from infra.scheduler_presence_redis import SchedulerPresence
from infra.settings import Settings
from infra.stream_redis import RedisTokenStreams, connect
from infra.tasks import end_tasks
from infra.telemetry import QUEUE_DEPTH
from infra.worker_feed_redis import WorkerFeed

from .errors import RoleStuck
from .overload_watch import OverloadWatch
from .policy import make_policy
from .reaping import Reaper
from .scheduler import STAGE, Scheduler

log = logging.getLogger(__name__)

#: Leases are checked and depths published so often.
TICK_SECONDS = 0.25
#: How long a read of the worker feed or of the queues waits for something to come.
BLOCK_MS = 250
PAUSE_SECONDS = 0.5

DEPTH_TTL_MS = 3_000


@dataclass
class _QueuePositions(Tracked):
    """Positions of the queue topics; tells the scheduler which partitions it no longer has."""

    scheduler: Scheduler | None = None

    def on_partitions_assigned(self, assigned: Iterable[Partition]) -> None:
        super().on_partitions_assigned(assigned)
        kept = {(p.topic, p.partition) for p in assigned}
        if self.scheduler is not None:
            self.scheduler.lose(lambda topic, partition: (topic, partition) in kept)


class SchedulerRole:
    """The scheduler process (see :class:`infra.role.Role`)."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._topics = settings.kafka.topics
        #: New with each process: workers grant their slots to this one as long as it lives.
        self.scheduler_id = f"{STAGE}-{uuid.uuid4().hex[:12]}"
        self._redis = connect(settings.redis)
        self._feeds = connect(settings.redis, blocking=True)
        self._streams = RedisTokenStreams(self._redis, settings.streams)
        self._publisher = Publisher(settings.kafka)
        self._policy = make_policy(
            settings.scheduler.policy, settings.scheduler, settings.streams.lease_ms, self.scheduler_id
        )
        self._consumer: AIOKafkaConsumer | None = None
        self._intake: QueueIntake | None = None
        self._overload: OverloadWatch | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Connect, join the group, begin."""
        await self._streams.ping()
        await self._publisher.start()
        consumer = make_consumer(
            self._settings.kafka, group=f"{self._topics.prefix}-{STAGE}", client_id=f"headrace-{STAGE}"
        )
        self._consumer = consumer
        tracked = _QueuePositions(consumer, CommitAlarm(self._settings.kafka.stall_seconds))
        scheduler = tracked.scheduler = Scheduler(
            topics=self._topics,
            policy=self._policy,
            streams=self._streams,
            publisher=self._publisher,
            presence=ReaderPresence(self._redis),
            scheduler_id=self.scheduler_id,
        )
        reaper = Reaper(
            OpenRequests(self._redis, self._topics.prefix),
            self._streams,
            self._publisher,
            self._topics.outcomes,
            scheduler.held_ids,
            self._settings.scheduler.orphan_seconds,
            scheduler.clock.now_ms,
        )
        self._overload = OverloadWatch(
            self._settings,
            OverloadBoard(self._redis),
            scheduler.delays,
            self._policy.is_waiting,
            scheduler.clock.now_ms,
            self._pause,
        )
        self._intake = QueueIntake(self._settings, consumer, tracked, scheduler)
        consumer.subscribe(list(self._topics.queues), listener=tracked)
        await consumer.start()
        self._tasks = [
            asyncio.ensure_future(work)
            for work in (
                self._intake.run(),
                scheduler.deliver(),
                self._watching(scheduler),
                self._reporting(self._intake),
                self._announcing(scheduler),
                self._intake.until_stalled(),
                reaper.run(),
                self._overload.run(),
                *(self._listen(scheduler, pool) for pool in self._settings.pools),
            )
        ]

    def reconfigure(self, settings: Settings) -> None:
        """See :class:`infra.role.Role`."""
        self._settings = settings
        self._policy.reconfigure(settings.scheduler)
        if self._overload is not None:
            self._overload.reconfigure(settings)

    def _pause(self, classes: frozenset[QueueClass]) -> None:
        self._policy.pause(classes)
        if self._intake is not None:
            self._intake.scheduler.react()

    async def not_ready(self) -> str | None:
        """Why requests are not scheduled right now."""
        if self._consumer is None or not self._consumer.assignment():
            return "no partitions"
        if self._intake is not None and self._intake.tracked.alarm.is_on():
            return POSITIONS_NOT_COMMITTED
        await self._streams.ping()
        return None

    async def run(self) -> None:
        """Ends only when one of its loops has."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise RoleStuck("a loop of the scheduler ended")

    async def drain(self) -> None:
        """Take nothing new, finish the effects under way, commit."""
        await self._cancel()
        if self._intake is not None:
            await self._intake.scheduler.finish(self._settings.drain_seconds)
            await self._intake.tracked.commit()
        await self._announce(lambda known, _: known.leave(self.scheduler_id))

    async def stop(self) -> None:
        """See :class:`infra.role.Role`."""
        await self._cancel()
        if self._intake is not None:
            await self._intake.scheduler.finish(0)
        if self._consumer is not None:
            await self._consumer.stop()
        await self._publisher.stop()
        await self._feeds.aclose()
        await self._redis.aclose()

    async def _cancel(self) -> None:
        await end_tasks(self._tasks)
        self._tasks.clear()

    async def _listen(self, scheduler: Scheduler, pool: str) -> None:
        """Follow the worker feed of one pool, from its end: what is older tells nothing about now."""
        feed = WorkerFeed(self._feeds, pool)
        position: str | None = None
        while True:
            try:
                async with asyncio.timeout(BLOCK_MS / 1000 + self._settings.redis.timeout_seconds):
                    if position is None:
                        position, _ = await feed.recent(1)
                    position, events = await feed.read(position, BLOCK_MS)
            except (RedisError, OSError, TimeoutError, ValidationError) as error:
                log.warning("worker feed", extra={"pool": pool, "error": type(error).__name__})
                position = None
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            for event in events:
                scheduler.heard(pool, event)
            if events:
                scheduler.react()

    async def _announcing(self, scheduler: Scheduler) -> None:
        """Tell the workers of each pool that this scheduler lives, and how much waits here for them."""
        while True:
            await self._announce(
                lambda known, pool: known.announce(self.scheduler_id, scheduler.backlog(pool))
            )
            await asyncio.sleep(self._settings.worker.heartbeat_ms / 1000)

    async def _announce(self, say: Callable[[SchedulerPresence, str], Awaitable[None]]) -> None:
        ttl_ms = self._settings.worker.scheduler_ttl_ms
        for pool in self._settings.pools:
            try:
                await say(SchedulerPresence(self._redis, pool, ttl_ms), pool)
            except (RedisError, OSError, TimeoutError) as error:
                log.warning("workers not told", extra={"pool": pool, "error": type(error).__name__})

    async def _watching(self, scheduler: Scheduler) -> None:
        """What only time brings: lapsed leases, deadlines, ageing. Never waits for Kafka."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                await scheduler.probe()
                await scheduler.look_for_readers()
            except StreamsUnavailable as error:
                log.warning("leases and readers not read", extra={"error": str(error)[:200]})
            scheduler.react()

    async def _reporting(self, intake: QueueIntake) -> None:
        """Commits and depths. A rebalance can hold these up, and nothing else."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            await intake.tracked.commit(now=time.monotonic())
            await self._publish_depths(await intake.depths())

    async def _publish_depths(self, depths: dict[QueueClass, int]) -> None:
        for queue_class, depth in depths.items():
            QUEUE_DEPTH.labels(queue_class.value).set(depth)
        client: Any = self._redis
        try:
            async with client.pipeline(transaction=True) as pipe:
                pipe.hset(DEPTH_KEY, mapping={c.value: n for c, n in depths.items()})
                pipe.pexpire(DEPTH_KEY, DEPTH_TTL_MS)
                await pipe.execute()
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("depths not published", extra={"error": type(error).__name__})


class QueueIntake:
    """Reads the queues as far as the scheduler's windows have room; the rest waits in Kafka.

    A class whose window is full is not read, so its partitions stand still while the others move. One
    read may overfill a window by what the other classes have room for, never by more.
    """

    def __init__(
        self,
        settings: Settings,
        consumer: AIOKafkaConsumer,
        tracked: Tracked,
        scheduler: Scheduler,
    ) -> None:
        self._stall_seconds = settings.kafka.stall_seconds
        self._window = settings.scheduler.window_per_class
        self._classes = settings.kafka.topics.queues
        self._consumer = consumer
        self.tracked = tracked
        self.scheduler = scheduler
        self._old_below: dict[Partition, int] = {}

    async def run(self) -> None:
        """Read for ever."""
        while True:
            room = self._room()
            ready = [p for p in self._consumer.assignment() if room[self._classes[p.topic]] > 0]
            if not ready or self.tracked.alarm.is_on():
                await asyncio.sleep(BLOCK_MS / 1000)
                continue
            most = min(room[self._classes[p.topic]] for p in ready)
            try:
                batch = await self._consumer.getmany(
                    *ready, timeout_ms=BLOCK_MS, max_records=min(most, 500)
                )
            except KafkaError as error:
                log.warning("no records", extra={"error": type(error).__name__})
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if batch:
                await self._admit(batch)

    async def _admit(self, batch: dict[Partition, list[ConsumerRecord]]) -> None:
        old: list[tuple[ConsumerRecord, Place]] = []
        new: list[tuple[ConsumerRecord, Place]] = []
        for partition, records in batch.items():
            if partition not in self.tracked.marks:
                # The first records since we were given this partition: what was in it by then may have
                # been dispatched by its former owner.
                self._old_below[partition] = self._consumer.highwater(partition) or 0
            for record in records:
                is_old = record.offset < self._old_below[partition]
                (old if is_old else new).append((record, self.tracked.take(record)))
        if new:
            await self.scheduler.admit(new, old=False)
        if old:
            await self.scheduler.admit(old, old=True)

    async def until_stalled(self) -> None:
        """Return when a partition that has room is no longer followed."""
        await until_stalled(self._open_positions, self._ends, self._stall_seconds)

    async def _open_positions(self) -> dict[Partition, int | None]:
        if self.tracked.alarm.is_on():
            return {}
        room = self._room()
        open_ones = [p for p in self._consumer.assignment() if room[self._classes[p.topic]] > 0]
        return {p: await self._consumer.position(p) for p in open_ones}

    async def _ends(self, partitions: Iterable[Partition]) -> Mapping[Partition, int]:
        ends: Mapping[Partition, int] = await self._consumer.end_offsets(list(partitions))
        return ends

    def _room(self) -> dict[QueueClass, int]:
        waiting = self.scheduler.policy.waiting()
        return {c: self._window - n for c, n in waiting.items()}

    async def depths(self) -> dict[QueueClass, int]:
        """Waiting requests per class: those in the window and, where it is full, those still in Kafka."""
        depths = self.scheduler.policy.waiting()
        room = self._room()
        full = [p for p in self._consumer.assignment() if room[self._classes[p.topic]] <= 0]
        if not full:
            return depths
        try:
            ends = await self._consumer.end_offsets(full)
            for partition in full:
                behind = ends[partition] - await self._consumer.position(partition)
                depths[self._classes[partition.topic]] += max(0, behind)
        except (KafkaError, TimeoutError) as error:
            log.warning("lag not known", extra={"error": type(error).__name__})
        return depths
