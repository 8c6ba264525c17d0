"""Reading a worker's partition of the dispatch topic: records in, one task each, positions out in order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from contracts.errors import RecordError
from contracts.records import DispatchRecord, decode
from infra.kafka import Tracked
from infra.tasks import end_tasks
from infra.telemetry import HOP, traceparent_from

log = logging.getLogger(__name__)

_POLL_MS = 250
_PAUSE_SECONDS = 0.5
_CHECK_SECONDS = 1.0

#: Brings one request to its effect.
Handle = Callable[[DispatchRecord, str | None], Awaitable[None]]
#: Dead-letters a record that cannot be read, and ends its request where that is known.
Reject = Callable[[ConsumerRecord, RecordError], Awaitable[None]]


class Intake:
    """One worker's partition, by manual assignment: no group, no rebalance.

    A record is read again after a crash until its handler has returned; at most ``limit`` are open.
    """

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        partition: TopicPartition,
        *,
        handle: Handle,
        reject: Reject,
        limit: int,
    ) -> None:
        self._consumer = consumer
        self._partition = partition
        self._tracked = Tracked(consumer)
        self._handle = handle
        self._reject = reject
        self._limit = limit
        self._tasks: dict[asyncio.Task[None], int] = {}
        self._running: set[str] = set()
        self._room = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def choices(self) -> int:
        """Choices of the requests that are open here."""
        return sum(self._tasks.values())

    async def run(self) -> None:
        """Read and hand out until cancelled; the handed-out tasks go on.

        Raises:
            Exception: what a handler raised: this worker cannot go on.
        """
        reading = asyncio.ensure_future(self._read())
        try:
            await asyncio.wait({reading, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            await (self._failure if self._failure.done() else reading)
        finally:
            await end_tasks([reading])

    async def finish(self, seconds: float) -> int:
        """Wait up to ``seconds`` for the open requests, then cancel the rest and commit.

        Returns:
            How many were left unfinished.
        """
        tasks = set(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        left = [task for task in tasks if not task.done()]
        await end_tasks(left)
        await self._tracked.commit()
        if self._failure.done():
            self._failure.exception()  # seen: a draining worker goes anyway
        return len(left)

    async def _read(self) -> None:
        checked = time.monotonic()
        while True:
            while len(self._tasks) >= self._limit:
                self._room.clear()
                await self._room.wait()
            try:
                if time.monotonic() - checked >= _CHECK_SECONDS:
                    checked = time.monotonic()
                    if await self._tracked.start_over_if_forgotten(self._partition):
                        log.warning("the broker has forgotten our position, reading from the start")
                batch = await self._consumer.getmany(
                    timeout_ms=_POLL_MS, max_records=self._limit - len(self._tasks)
                )
            except KafkaError as error:
                log.warning("no records", extra={"error": type(error).__name__})
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            for records in batch.values():
                for record in records:
                    self._take(record)
            await self._tracked.commit(now=time.monotonic())

    def _take(self, record: ConsumerRecord) -> None:
        mark = self._tracked.take(record)
        reached = partial(mark.done, record.offset)
        try:
            request = decode(DispatchRecord, record.value)
        except RecordError as error:
            self._spawn(reached, 0, None, self._reject(record, error))
            return
        HOP.labels("dispatch").observe(max(0.0, time.time() - request.dispatched_ms / 1000))
        if request.request_id in self._running:
            # Dispatched twice to us: the first record keeps the position open until the request ends.
            reached()
            return
        self._running.add(request.request_id)
        work = self._handle(request, traceparent_from(record.headers))
        self._spawn(reached, request.sampling.n, request.request_id, work)

    def _spawn(
        self, reached: Callable[[], None], choices: int, request_id: str | None, work: Awaitable[None]
    ) -> None:
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
        self._tasks[task] = choices
        task.add_done_callback(ended)
