"""Kafka plumbing every role shares: producer, dead letters, and a consumer loop with watermarks."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, ConsumerRecord
from aiokafka import TopicPartition as Partition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError
from aiokafka.protocol.transaction import InitProducerIdRequest

from contracts.errors import RecordError
from contracts.records import DeadLetterRecord
from contracts.watermark import Watermark

from .commit_alarm import CommitAlarm
from .doorbell import Ringer, fetch_when_rung
from .settings import KafkaSettings
from .tasks import end_tasks

log = logging.getLogger(__name__)

_COMMIT_SECONDS = 2.0
#: Who waits for room does not poll, for hours if it must, and is no dead member of its group. Whether a
#: consumer follows its log is watched by :mod:`infra.kafka_watch`.
POLL_INTERVAL_MS = 7 * 24 * 3600 * 1000
#: Who reads to the end of a log waits so long for records, then looks at its positions again.
_LOOK_MS = 500

#: Kafka record headers, as aiokafka wants them.
Headers = list[tuple[str, bytes]]


class PublishError(Exception):
    """A record could not be handed to Kafka within its deadline: nothing was promised to anyone."""


class LogSilent(Exception):
    """A broker gives no more records, though there are some.

    Attributes:
        missing: positions before the end that were not reached.
    """

    def __init__(self, missing: int) -> None:
        super().__init__(f"{missing} records are missing")
        self.missing = missing


async def _broker_is_idempotent(settings: KafkaSettings) -> bool:
    """Ask a broker for a producer id: Apache Kafka gives one, the embedded broker does not."""
    client = AIOKafkaClient(bootstrap_servers=settings.bootstrap)
    try:
        await client.bootstrap()
        node = client.get_random_node()
        request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=10_000)
        response = await asyncio.wait_for(client.send(node, request), 5.0)
        return bool(response.error_code == 0)
    except (KafkaError, TimeoutError, NotImplementedError):
        return False
    finally:
        await client.close()


class Publisher:
    """A Kafka producer that returns only when a record is acknowledged by all in-sync replicas."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._producer: AIOKafkaProducer | None = None
        self._ringer: Ringer | None = None

    async def start(self) -> None:
        """Connect; raises :class:`aiokafka.errors.KafkaError` while no broker answers."""
        idempotent = self._settings.idempotent
        if idempotent is None:
            idempotent = await _broker_is_idempotent(self._settings)
        producer = AIOKafkaProducer(
            bootstrap_servers=self._settings.bootstrap,
            acks="all",
            enable_idempotence=idempotent,
            request_timeout_ms=self._settings.request_timeout_ms,
            max_request_size=8 * 1024 * 1024,
            linger_ms=0,
        )
        try:
            await producer.start()
        except BaseException:
            await producer.stop()
            raise
        self._producer = producer
        if self._settings.doorbells is not None:
            self._ringer = Ringer(self._settings.doorbells)

    async def stop(self) -> None:
        """Flush and disconnect."""
        if self._producer is not None:
            await self._producer.stop()
            self._producer = None
        if self._ringer is not None:
            self._ringer.close()
            self._ringer = None

    async def ping(self) -> None:
        """Raise :class:`PublishError` unless a broker answers. Wait for it with a deadline."""
        if self._producer is None:
            raise PublishError("the Kafka producer is not connected")
        if not await self._producer.client.force_metadata_update():
            raise PublishError("no Kafka broker answers")

    async def send(
        self,
        topic: str,
        value: bytes,
        *,
        key: str | None = None,
        partition: int | None = None,
        headers: Headers | None = None,
    ) -> None:
        """Publish one record and wait for its acknowledgement.

        Raises:
            PublishError: not acknowledged within the deadline. It may still have been stored; records
                are idempotent by their request id.
        """
        if self._producer is None:
            raise PublishError("the Kafka producer is not connected")
        try:
            stored = await asyncio.wait_for(
                self._producer.send_and_wait(
                    topic,
                    value,
                    key=key.encode() if key is not None else None,
                    partition=partition,
                    headers=headers or [],
                ),
                self._settings.request_timeout_ms / 1000,
            )
        except (KafkaError, TimeoutError, AssertionError) as error:
            raise PublishError(f"{topic}: {type(error).__name__}") from error
        if self._ringer is not None:
            self._ringer.ring((topic, stored.partition), stored.offset)

    async def dead_letter(
        self, deadletter_topic: str, stage: str, record: ConsumerRecord, error: RecordError
    ) -> None:
        """Publish a record that cannot be handled, with where it came from and why."""
        letter = DeadLetterRecord(
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            stage=stage,
            reason=error.reason,
            detail=error.detail,
            request_id=error.request_id,
            failed_ms=int(time.time() * 1000),
            payload_base64=base64.b64encode(record.value or b"").decode(),
        )
        await self.send(deadletter_topic, letter.encode(), key=error.request_id)
        log.warning(
            "record dead-lettered",
            extra={
                "topic": record.topic,
                "partition": record.partition,
                "offset": record.offset,
                "reason": error.reason,
                "request_id": error.request_id,
            },
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record that was handed out stands, and the mark it counts in."""

    topic: str
    partition: int
    offset: int
    mark: Watermark

    def is_same_record(self, other: Place) -> bool:
        """Whether ``other`` is this place in the log, maybe seen before or after a rebalance."""
        return (self.topic, self.partition, self.offset) == (other.topic, other.partition, other.offset)

    def done(self) -> None:
        """The record has reached its effect. Idempotent; of no effect once its mark was dropped."""
        self.mark.done(self.offset)


@dataclass
class Tracked(ConsumerRebalanceListener):  # type: ignore[misc]
    """A consumer whose positions are committed by contiguous watermark, never automatically.

    The places of taken records are ``done`` in any order, from any task. A rebalance drops the marks of all
    partitions, also of those which stay: they are read again from what was committed, and if the broker has
    lost its memory meanwhile, the old positions mean other records, or none.
    """

    consumer: AIOKafkaConsumer
    alarm: CommitAlarm
    commit_interval_seconds: float = 1.0
    marks: dict[Partition, Watermark] = field(default_factory=dict)
    _last_commit: float = 0.0
    _sending: set[asyncio.Task[None]] = field(default_factory=set)

    def take(self, record: ConsumerRecord) -> Place:
        """Note that a record was handed out."""
        mark = self.marks.setdefault(Partition(record.topic, record.partition), Watermark())
        mark.take(record.offset)
        return Place(record.topic, record.partition, record.offset, mark)

    async def begin(self, partition: Partition) -> None:
        """Note on the broker where an assignment of our own begins: see :meth:`start_over_if_forgotten`.

        Raises:
            KafkaError: not noted.
            TimeoutError: the same; aiokafka tries for ever.
        """
        self.alarm.tried()
        async with asyncio.timeout(_COMMIT_SECONDS):
            position = await self.consumer.position(partition)
            await self.consumer.commit({partition: position})
        self.marks.setdefault(partition, Watermark()).committed(position)
        self.alarm.settled()

    async def start_over_if_forgotten(self, partition: Partition) -> bool:
        """Read a partition from its beginning if the broker no longer knows the position we committed.

        So it is when a broker has lost its memory. A group's members notice by their heartbeats; a consumer
        with an assignment of its own would wait at a position that the new, shorter log has yet to reach,
        and miss what comes before it. To be asked before every commit, which would hide the loss; what
        cannot be asked cannot be committed.

        Raises:
            KafkaError: nothing is known.
            TimeoutError: the same.
        """
        self.alarm.tried()
        async with asyncio.timeout(_COMMIT_SECONDS):
            mark = self.marks.get(partition)
            committed = await self.consumer.committed(partition)
            known = mark.last_committed if mark is not None else None
            if committed is not None and committed >= (known or 0):
                return False
            # Records that are still open count in the old mark, and no longer for any position.
            self.marks.pop(partition, None)
            await self.consumer.seek_to_beginning(partition)
            await self.begin(partition)
            return True

    async def commit(self, *, now: float | None = None) -> None:
        """Commit what is due; with ``now`` (monotonic seconds) at most once per interval.

        A failed commit is logged and tried again at the next call: the worst it causes is a repeat,
        which the stream ids make harmless. The alarm hears of it.
        """
        if now is not None:
            if now - self._last_commit < self.commit_interval_seconds:
                return
            self._last_commit = now
        due = {p: (m, pos) for p, m in self.marks.items() if (pos := m.commit_due()) is not None}
        if not due:
            self.alarm.settled()
            return
        self.alarm.tried()
        commit = self.consumer.commit({p: position for p, (_, position) in due.items()})
        self._sending.add(sending := asyncio.create_task(commit))
        try:
            # asyncio.wait: aiokafka tries some errors again for ever, and a rebalance cancels the commit.
            await asyncio.wait({sending}, timeout=_COMMIT_SECONDS)
        finally:
            self._sending.discard(sending)
            sending.cancel()
        if not sending.done() or sending.cancelled():
            log.warning("commit failed", extra={"error": "no answer, or a rebalance"})
            return
        error = sending.exception()
        if isinstance(error, (CommitFailedError, IllegalStateError, KafkaError)):
            log.warning("commit failed", extra={"error": type(error).__name__})
            return
        if error is not None:
            raise error
        for mark, position in due.values():
            mark.committed(position)
        self.alarm.settled()

    async def on_partitions_revoked(self, revoked: Iterable[Partition]) -> None:
        """Aiokafka calls this before it joins again.

        A commit under way must not outlive this: the broker takes it from a consumer that is in no group, and
        if the broker has lost its memory, the position would skip records of the new log. What was reached
        since the last commit is read again, which the stream ids make harmless.
        """
        await end_tasks(list(self._sending))
        for partition in revoked:
            self.marks.pop(partition, None)

    def on_partitions_assigned(self, assigned: Iterable[Partition]) -> None:
        """Aiokafka calls this after a rebalance with all partitions this consumer now has."""


def make_consumer(
    settings: KafkaSettings,
    *,
    group: str | None,
    client_id: str,
) -> AIOKafkaConsumer:
    """A consumer with manual commits that starts at the beginning where nothing is committed."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=settings.bootstrap,
        group_id=group,
        client_id=client_id,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        fetch_max_wait_ms=settings.fetch_max_wait_ms,
        session_timeout_ms=settings.session_timeout_ms,
        heartbeat_interval_ms=max(300, settings.session_timeout_ms // 5),
        request_timeout_ms=max(settings.request_timeout_ms, settings.session_timeout_ms + 1_000),
        max_partition_fetch_bytes=8 * 1024 * 1024,
        max_poll_records=500,
        max_poll_interval_ms=POLL_INTERVAL_MS,
    )
    if settings.doorbells is not None:
        fetch_when_rung(consumer, settings.doorbells)
    return consumer


def make_reader(settings: KafkaSettings, topic: str, *, client_id: str) -> AIOKafkaConsumer:
    """A consumer for :func:`read_to_end`: every partition of the topic is its own, from its beginning.

    It fetches with patience, as the embedded broker finds nothing in a long log within a short fetch.
    """
    patience_ms = max(settings.fetch_max_wait_ms, _LOOK_MS)
    patient = settings.model_copy(update={"doorbells": None, "fetch_max_wait_ms": patience_ms})
    consumer = make_consumer(patient, group=None, client_id=client_id)
    consumer.subscribe([topic])
    return consumer


async def read_to_end(
    consumer: AIOKafkaConsumer, ends: Mapping[Partition, int], silence_seconds: float
) -> AsyncIterator[list[ConsumerRecord]]:
    """The records before ``ends``, from where a reader stands, in batches.

    It goes by the consumer's positions: a log may have holes (compaction, the marks of transactions), and may
    end with one.

    Raises:
        LogSilent: the end was not reached, and for so long nothing came.
        KafkaError: see :meth:`AIOKafkaConsumer.getmany`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + silence_seconds
    missing = sum(ends.values())
    while missing:
        before = missing
        try:
            async with asyncio.timeout_at(deadline):
                missing = await _missing(consumer, ends)
                batch = await consumer.getmany(timeout_ms=_LOOK_MS) if missing else {}
        except TimeoutError:
            raise LogSilent(missing) from None
        records = [r for p, some in batch.items() for r in some if r.offset < ends.get(p, 0)]
        if records:
            yield records
        if records or missing < before:
            deadline = loop.time() + silence_seconds


async def _missing(consumer: AIOKafkaConsumer, ends: Mapping[Partition, int]) -> int:
    """Positions between where the consumer stands and the ends."""
    return sum([max(0, end - await consumer.position(p)) for p, end in ends.items()])
