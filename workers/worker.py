"""The worker role: wires engine, token streams and Kafka together, and stops them in the right order."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from redis.exceptions import RedisError

from contracts.entries import Terminal
from contracts.errors import ErrorCode, RecordError, error_body
from contracts.preempt import PreemptRecord
from contracts.records import DispatchRecord
from contracts.tiers import Status
from contracts.token_stream import StreamsUnavailable
from infra.commit_alarm import POSITIONS_NOT_COMMITTED
from infra.kafka import Publisher, PublishError, make_consumer
from infra.presence_redis import ReaderPresence
from infra.scheduler_presence_redis import SchedulerPresence
from infra.settings import Settings, SettingsError
from infra.stream_redis import RedisTokenStreams, connect
from infra.tasks import end_tasks
from infra.telemetry import DEAD_LETTERS
from infra.worker_feed_redis import WorkerFeed

from .credits import CreditLedger
from .errors import EngineDead, WorkerError
from .handler import Services, handle
from .heartbeat import Heartbeat
from .in_hand import InHand
from .intake import Intake
from .leases import LeaseKeeper
from .leaving import LeaveWatch
from .prefix_memory import PrefixMemory
from .protocols import Engine
from .writer import StreamWriter

log = logging.getLogger(__name__)

_ENGINE_CHECK_SECONDS = 0.5
_CONNECTIONS_OF_ITS_OWN = 8
#: How long dispatches may still come after the schedulers were told to send none.
_LAST_DISPATCHES_SECONDS = 0.5
#: Heartbeats that a scheduler may act on a grant after a smaller one was sent: by then it has heard that
#: one, or counts this worker as silent.
_GRANT_HOLDS_HEARTBEATS = 4


class NoSlot(WorkerError):
    """All slots of the pool are taken; tried again later."""


class Worker:
    """See :class:`infra.role.Role`. One engine, one slot of a pool.

    On a dead engine or a lost slot :meth:`run` raises: nothing is sealed, the leases run out, and other
    workers go on with the replies.
    """

    def __init__(self, settings: Settings, pool: str, engine: Engine, index: int = 0) -> None:
        self._settings = settings
        self._pool = pool
        self._engine = engine
        self._topics = settings.kafka.topics
        self.worker_id = f"{pool}-{index}-{uuid.uuid4().hex[:12]}"
        self._redis = connect(settings.redis)
        self._append_redis = connect(settings.redis, steady=True)
        self._streams = RedisTokenStreams(self._redis, settings.streams)
        self._feed = WorkerFeed(self._redis, pool)
        self._publisher = Publisher(settings.kafka)
        self._consumer: AIOKafkaConsumer | None = None
        self._heartbeat: Heartbeat | None = None
        self._intake: Intake | None = None
        self._reading: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving = False
        self.slot: int | None = None

    async def start(self) -> None:
        """Connect first, as that is cheap to try again, then load the model, then take work."""
        worker, streams = self._settings.worker, self._settings.streams
        await self._streams.ping()
        await self._publisher.start()
        consumer = make_consumer(
            self._settings.kafka,
            group=f"{self._settings.kafka.topic_prefix}-worker-{self._pool}",
            client_id=self.worker_id,
        )
        self._consumer = consumer
        await consumer.start()
        await self._engine.start()
        slot_ttl_ms = max(5_000, 6 * worker.heartbeat_ms)
        slot = await self._feed.claim_slot(self.worker_id, self._topics.worker_slots, slot_ttl_ms)
        if slot is None:
            raise NoSlot(self._pool)
        self.slot = slot
        topic = self._topics.dispatch(self._pool)
        partitions = [TopicPartition(topic, number) for number in self._topics.partitions_of(slot)]
        consumer.assign(partitions)
        give_up = max(5.0, 4 * streams.lease_ms / 1000)
        appending = RedisTokenStreams(self._append_redis, streams)
        writer = StreamWriter(appending, give_up_seconds=give_up)
        leases = LeaseKeeper(self._streams, self.worker_id, streams.lease_ms)
        leaving = LeaveWatch(ReaderPresence(self._redis), self._streams)
        in_hand = InHand()
        heartbeat = Heartbeat(
            self._feed,
            self.worker_id,
            slot,
            interval_ms=worker.heartbeat_ms,
            slot_ttl_ms=slot_ttl_ms,
            capacity=self._engine.capacity,
            tier_news=self._engine.take_tier_news,
            in_hand=in_hand,
            prefixes=PrefixMemory(self._engine.capacity().kv_tokens_total),
            credits=CreditLedger(_GRANT_HOLDS_HEARTBEATS * worker.heartbeat_ms),
            schedulers=SchedulerPresence(self._redis, self._pool, worker.scheduler_ttl_ms),
        )
        services = Services(
            worker_id=self.worker_id,
            model_revision=self._revision(),
            settings=worker,
            engine=self._engine,
            streams=self._streams,
            writer=writer,
            leases=leases,
            leaving=leaving,
            publisher=self._publisher,
            outcomes_topic=self._topics.outcomes,
            in_hand=in_hand,
            prefilled=heartbeat.prefilled,
            finished=heartbeat.finished,
            handed_over=heartbeat.handed_over,
            give_up_seconds=give_up,
            gate=asyncio.Semaphore(_CONNECTIONS_OF_ITS_OWN),
        )

        def take(record: DispatchRecord, traceparent: str | None) -> Coroutine[Any, Any, None]:
            heartbeat.taken(record)
            return handle(services, record, traceparent)

        def preempt(wish: PreemptRecord) -> None:
            if wish.worker_id == self.worker_id:
                in_hand.preempt(wish.preempted_id, wish.attempt)

        self._intake = Intake(
            consumer,
            partitions,
            handle=take,
            reject=self._reject,
            preempt=preempt,
            limit=2 * worker.max_seqs + 16,
            stall_seconds=self._settings.kafka.stall_seconds,
        )
        self._heartbeat = heartbeat
        self._spawn(writer.run(), "writer")
        self._spawn(leases.run(), "leases")
        self._spawn(leaving.run(), "leaving")
        self._spawn(heartbeat.run(), "heartbeat")
        self._spawn(self._watch_engine(), "engine")
        self._reading = self._spawn(self._intake.run(), "intake")
        log.info("worker started", extra={"worker": self.worker_id, "pool": self._pool, "slot": slot})

    async def run(self) -> None:
        """Until a part of it fails; a dead engine is reported to the schedulers first."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        failure = next((error for task in done if (error := task.exception()) is not None), None)
        log.error("worker cannot go on", extra={"worker": self.worker_id, "error": repr(failure)[:200]})
        await self._stop_accepting()
        raise failure or WorkerError("a part of the worker ended")

    def reconfigure(self, settings: Settings) -> None:
        """See :class:`infra.role.Role`. Nothing of what can change concerns a worker."""

    async def not_ready(self) -> str | None:
        """See :class:`infra.role.Role`."""
        if self._heartbeat is None:
            return "starting"
        if not self._heartbeat.accepting:
            return "draining"
        if self._intake is not None and self._intake.alarm.is_on():
            return POSITIONS_NOT_COMMITTED
        try:
            await self._engine.check()
            await self._streams.ping()
        except EngineDead:
            return "engine dead"
        except StreamsUnavailable:
            return "redis unreachable"
        return None

    async def drain(self) -> None:
        """Have the schedulers send nothing more, and let replies finish; :meth:`stop` hands over the rest."""
        self._leaving = True
        until = time.monotonic() + self._settings.worker.drain_seconds
        await self._stop_accepting()
        # What was dispatched before they heard it is served here: elsewhere it would wait for a lease's time.
        await asyncio.sleep(min(_LAST_DISPATCHES_SECONDS, self._settings.worker.drain_seconds))
        if self._reading is not None:
            await end_tasks([self._reading])
        if self._intake is not None:
            await self._intake.finish(max(0.0, until - time.monotonic()))

    async def stop(self) -> None:
        """See :class:`infra.role.Role`. After :meth:`drain` what still runs is handed over.

        A worker that stops because it has failed keeps its leases until they run out: that counts as a loss
        of the requests that ran here, and one of them may be what it died of.
        """
        await end_tasks(self._tasks)
        if self._intake is not None:
            left = await self._intake.close(hand_over=self._leaving)
            if self._leaving:
                await self._hand_over(left)
        await self._engine.close()
        if self.slot is not None:
            try:
                await self._feed.release_slot(self.worker_id, self.slot)
            except (RedisError, OSError) as error:
                log.warning("slot not released", extra={"error": type(error).__name__})
        if self._consumer is not None:
            await self._consumer.stop()
        await self._publisher.stop()
        await self._append_redis.aclose()
        await self._redis.aclose()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        return task

    async def _stop_accepting(self) -> None:
        if self._heartbeat is None:
            return
        self._heartbeat.set_accepting(False)
        try:
            await self._heartbeat.publish()
        except (RedisError, OSError) as error:
            log.warning("schedulers not told", extra={"error": type(error).__name__})

    async def _hand_over(self, request_ids: list[str]) -> None:
        """Give up the leases, then say so; what of it fails is found out when the leases run out."""
        log.info("drained", extra={"worker": self.worker_id, "handed_over": len(request_ids)})
        if self._heartbeat is None:
            return
        try:
            await self._streams.give_up_leases(request_ids, self.worker_id)
            for request_id in request_ids:
                self._heartbeat.handed_over(request_id)
            await self._heartbeat.publish()
        except (StreamsUnavailable, RedisError, OSError) as error:
            log.warning("replies not handed over", extra={"error": type(error).__name__})

    async def _watch_engine(self) -> None:
        while True:
            await self._engine.check()
            await asyncio.sleep(_ENGINE_CHECK_SECONDS)

    async def _reject(self, record: ConsumerRecord, error: RecordError) -> None:
        """Dead-letter a record and end its request, trying again until both are done."""
        DEAD_LETTERS.labels("worker", error.reason).inc()
        pause = 0.1
        while True:
            try:
                await self._publisher.dead_letter(self._topics.deadletter, "worker", record, error)
                if error.request_id is not None:
                    body = error_body(ErrorCode.BAD_RECORD, "the request could not be read by a worker")
                    await self._streams.seal(
                        error.request_id, Terminal(status=Status.FAILED, error=body)
                    )
                return
            except (PublishError, StreamsUnavailable) as failure:
                log.warning("record not dead-lettered", extra={"error": str(failure)[:200]})
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)

    def _revision(self) -> str:
        models = [m for m in self._settings.models.values() if m.pool == self._pool]
        return models[0].revision if models else "1"


def model_path(settings: Settings, pool: str) -> str:
    """The model folder a pool serves.

    Raises:
        SettingsError: no model is in the pool, or several with different folders are.
    """
    paths = {m.path for m in settings.models.values() if m.pool == pool}
    if len(paths) != 1:
        raise SettingsError(f"the pool {pool} must serve one model, it has {len(paths)}")
    return paths.pop()
