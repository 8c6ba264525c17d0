"""Reading a worker's partitions of the dispatch topic: records in, one task each, positions out in order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from contracts.errors import RecordError
from contracts.preempt import PreemptRecord, is_preempt, read_preempt
from contracts.records import DispatchRecord, decode
from infra.commit_alarm import CommitAlarm
from infra.kafka import Tracked
from infra.kafka_watch import until_stalled
from infra.tasks import end_tasks
from infra.telemetry import HOP, traceparent_from

from .errors import IntakeStuck

log = logging.getLogger(__name__)

_POLL_MS = 250
_PAUSE_SECONDS = 0.5
_CHECK_SECONDS = 1.0

#: Takes a request in hand at once; what it returns brings it to its effect.
Handle = Callable[[DispatchRecord, str | None], Awaitable[None]]
#: Makes room, if it is the running attempt of this worker that is meant.
Preempt = Callable[[PreemptRecord], None]
#: Dead-letters a record that cannot be read, and ends its request where that is known.
Reject = Callable[[ConsumerRecord, RecordError], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Open:
    """A record that is being handled.

    Attributes:
        request_id: None where it cannot be read.
        reached: to be called when its position may be committed.
    """

    request_id: str | None
    reached: Callable[[], None]


class Intake:
    """One worker's partitions, by manual assignment: no group, no rebalance.

    A record is read again after a crash until its handler has returned; at most ``limit`` are open.
    """

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        partitions: Sequence[TopicPartition],
        *,
        handle: Handle,
        reject: Reject,
        preempt: Preempt,
        limit: int,
        stall_seconds: float,
    ) -> None:
        """Prepare; nothing is read before :meth:`run`.

        Args:
            limit: records that may be open at once.
            stall_seconds: see :class:`infra.settings.KafkaSettings`.
        """
        self._consumer = consumer
        self._partitions = partitions
        self.alarm = CommitAlarm(stall_seconds)
        self._tracked = Tracked(consumer, self.alarm)
        self._handle = handle
        self._reject = reject
        self._preempt = preempt
        self._limit = limit
        self._stall_seconds = stall_seconds
        self._tasks: dict[asyncio.Task[None], _Open] = {}
        self._running: set[str] = set()
        self._room = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Read and hand out until cancelled; the handed-out tasks go on.

        Raises:
            Exception: what a handler raised: this worker cannot go on.
            IntakeStuck: no records come, though there are some.
        """
        reading = asyncio.ensure_future(self._read())
        watching = asyncio.ensure_future(until_stalled(self._positions, self._ends, self._stall_seconds))
        try:
            await asyncio.wait({reading, watching, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            await (self._failure if self._failure.done() else reading if reading.done() else watching)
            raise IntakeStuck("no records come from the dispatch topic")
        finally:
            await end_tasks([reading, watching])

    async def _positions(self) -> dict[TopicPartition, int | None]:
        if len(self._tasks) >= self._limit or self.alarm.is_on():
            return {}
        return {p: await self._consumer.position(p) for p in self._partitions}

    async def _ends(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, int]:
        ends: Mapping[TopicPartition, int] = await self._consumer.end_offsets(list(partitions))
        return ends

    async def finish(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the open requests, and commit those that ended."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=seconds)
        await self._tracked.commit()

    async def close(self, *, hand_over: bool) -> list[str]:
        """Cancel the requests that are still open, and commit.

        Args:
            hand_over: their positions count as reached: the caller tells the schedulers, which hold each
                request until its seal. Otherwise they are read again by the next worker of this slot.

        Returns:
            The requests that were left unfinished.
        """
        left = dict(self._tasks)
        await end_tasks(left.keys())
        unfinished = [open_ for task, open_ in left.items() if task.cancelled()]
        if hand_over:
            for open_ in unfinished:
                if open_.request_id is not None:
                    open_.reached()
        await self._tracked.commit()
        if self._failure.done():
            self._failure.exception()  # seen: this worker goes anyway
        return [open_.request_id for open_ in unfinished if open_.request_id is not None]

    async def _read(self) -> None:
        begun = False
        checked = time.monotonic()
        while True:
            while len(self._tasks) >= self._limit:
                self._room.clear()
                await self._room.wait()
            try:
                if not begun:
                    for partition in self._partitions:
                        await self._tracked.begin(partition)
                    begun = True
                elif time.monotonic() - checked >= _CHECK_SECONDS:
                    await self._keep_position()
                    checked = time.monotonic()
                if self.alarm.is_on():
                    await asyncio.sleep(_PAUSE_SECONDS)
                    continue
                batch = await self._consumer.getmany(
                    timeout_ms=_POLL_MS, max_records=self._limit - len(self._tasks)
                )
            except (KafkaError, TimeoutError) as error:
                log.warning("no records", extra={"error": type(error).__name__})
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            for records in batch.values():
                for record in records:
                    self._take(record)

    async def _keep_position(self) -> None:
        """Commit what is due. Where that fails, records are read on until the alarm is on."""
        try:
            for partition in self._partitions:
                if await self._tracked.start_over_if_forgotten(partition):
                    log.warning("the broker has forgotten our position, reading from the start")
            await self._tracked.commit()
        except (KafkaError, TimeoutError) as error:
            log.warning("position not kept", extra={"error": type(error).__name__})

    def _take(self, record: ConsumerRecord) -> None:
        reached = self._tracked.take(record).done
        if is_preempt(record.headers):
            wish = read_preempt(record.value)
            if wish is None:
                log.warning("unreadable wish for room", extra={"offset": record.offset})
            else:
                self._preempt(wish)
            reached()
            return
        try:
            request = decode(DispatchRecord, record.value)
        except RecordError as error:
            self._spawn(reached, None, self._reject(record, error))
            return
        HOP.labels("dispatch").observe(max(0.0, time.time() - request.dispatched_ms / 1000))
        if request.request_id in self._running:
            # Dispatched twice to us: the first record keeps the position open until the request ends.
            reached()
            return
        self._running.add(request.request_id)
        work = self._handle(request, traceparent_from(record.headers))
        self._spawn(reached, request.request_id, work)

    def _spawn(self, reached: Callable[[], None], request_id: str | None, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[task]
            self._room.set()
            if request_id is not None:
                self._running.discard(request_id)
            if task.cancelled():
                return
            failure = task.exception()
            if failure is None:
                reached()
            elif not self._failure.done():
                self._failure.set_exception(failure)

        task = asyncio.create_task(run())
        self._tasks[task] = _Open(request_id, reached)
        task.add_done_callback(ended)
