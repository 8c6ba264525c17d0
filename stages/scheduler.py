"""The scheduler's shell: performs what the policy decides, and tells it what became of it.

It knows neither consumer groups nor the policy's reasons: records come in through :meth:`Scheduler.admit`,
worker events through :meth:`Scheduler.heard`, positions go out through ``done``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka import ConsumerRecord
from opentelemetry.trace import Span, SpanKind

from contracts.entries import Dispatched, Terminal
from contracts.errors import ErrorCode, RecordError, error_body
from contracts.preempt import PREEMPT_HEADERS, PreemptRecord
from contracts.records import DispatchRecord, QueuedRecord, decode
from contracts.stream_ids import DISPATCHED, StreamId
from contracts.tiers import Status
from contracts.token_stream import Appended, StreamsUnavailable
from contracts.topics import Topics
from contracts.worker_events import WorkerEvent
from infra.kafka import Place, Publisher, PublishError
from infra.presence_redis import ReaderPresence
from infra.stream_redis import RedisTokenStreams
from infra.tasks import end_tasks
from infra.telemetry import (
    DEAD_LETTERS,
    DISPATCHED_TOKENS,
    HOP,
    LEFT_REQUESTS,
    QUEUE_WAIT,
    REDISPATCHES,
    end_span,
    start_span,
    trace_headers,
    traceparent_from,
    traceparent_of,
)

from .leaving import WaitingReaders
from .outcomes import Endings
from .protocols import Dispatch, Expire, GiveUp, Job, Preempt, SchedulingPolicy
from .queue_delay import QueueDelays
from .retry import until_done

log = logging.getLogger(__name__)

STAGE = "scheduler"
#: Requests that are being ended at once (seal, read, publish).
ENDINGS_AT_ONCE = 32
#: Pause after a dispatch that Redis or Kafka did not take, before anything is tried again.
TROUBLE_PAUSE_SECONDS = 0.2

_EXPIRED = Terminal(
    status=Status.EXPIRED,
    error=error_body(ErrorCode.DEADLINE_EXCEEDED, "The request waited too long to be started."),
)
_LEFT = Terminal(status=Status.CANCELLED)
_WORKER_LOST = Terminal(
    status=Status.FAILED,
    error=error_body(ErrorCode.WORKER_LOST, "The worker was lost and no other could take over."),
)
_BAD_RECORD = Terminal(
    status=Status.FAILED,
    error=error_body(ErrorCode.BAD_RECORD, "The request could not be processed."),
)

#: Younger than this since moderation, a request has not waited, so hardly anybody can have cancelled it.
STRAIGHT_MS = 100


class SteadyClock:
    """Unix milliseconds that never step: the wall clock at start, and monotonic time since."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def now_ms(self) -> int:
        """Unix milliseconds."""
        return (self._offset_ns + time.monotonic_ns()) // 1_000_000


@dataclass(slots=True)
class _Held:
    """A request between its queue record and its seal.

    Attributes:
        places: its queue records (a redelivered moderation queues it twice).
        checked: whether its stream has been looked at, or we have dispatched it ourselves.
        ending: whether it is being ended.
        worker_id / attempt: where it was dispatched or found to run last; empty = nowhere.
        span: open while it waits.
    """

    record: QueuedRecord
    places: list[Place]
    traceparent: str | None
    span: Span | None
    checked: bool = False
    ending: bool = False
    worker_id: str = ""
    attempt: int = 0

    def stands_at(self, place: Place) -> None:
        """Note another record of this request, or the same one again after a rebalance."""
        self.places[:] = [p for p in self.places if not p.is_same_record(place)]
        self.places.append(place)

    def close_span(self, error: str | None = None) -> None:
        if self.span is not None:
            end_span(self.span, error)
            self.span = None


@dataclass
class Scheduler:
    """Takes queue records to the seals of their requests.

    A record's place is ``done`` once its stream is sealed and, unless the worker that sealed
    it publishes the outcome, the outcome is on Kafka. Everything in between survives a restart: the
    records are read again, and their streams and leases tell how far they have come.
    """

    topics: Topics
    policy: SchedulingPolicy
    streams: RedisTokenStreams
    publisher: Publisher
    presence: ReaderPresence
    scheduler_id: str = ""
    clock: SteadyClock = field(default_factory=SteadyClock)
    delays: QueueDelays = field(default_factory=QueueDelays)
    _held: dict[str, _Held] = field(default_factory=dict)
    _leaving: WaitingReaders = field(default_factory=WaitingReaders)
    _outbox: list[Dispatch] = field(default_factory=list)
    _outgoing: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ENDINGS_AT_ONCE))

    def __post_init__(self) -> None:
        self._endings = Endings(self.streams, self.publisher, self.topics.outcomes)

    async def admit(self, records: Sequence[tuple[ConsumerRecord, Place]], *, old: bool) -> None:
        """Take queue records in.

        Args:
            old: they may have been dispatched before (redelivered after a restart or a rebalance), so
                their streams are looked at first; waits for Redis if it must.
        """
        new: list[str] = []
        for record, place in records:
            try:
                request = decode(QueuedRecord, record.value)
            except RecordError as error:
                self._spawn(self._bury(record, place, error))
                continue
            held = self._held.get(request.request_id)
            if held is None:
                self._held[request.request_id] = self._hold(request, place, record.headers)
                new.append(request.request_id)
            else:
                held.stands_at(place)
        if old:
            await self._resume(new)
        else:
            now_ms = self.clock.now_ms()
            for request_id in new:
                self.policy.queued(_job(self._held[request_id].record), now_ms)
        self.react()

    def _hold(self, request: QueuedRecord, place: Place, headers: Any) -> _Held:
        HOP.labels("queue").observe(max(0, self.clock.now_ms() - request.moderated_ms) / 1000)
        self.delays.joined(request.request_id, request.pool, request.tier, request.moderated_ms)
        traceparent = traceparent_from(headers)
        span = start_span(
            "schedule",
            traceparent,
            kind=SpanKind.CONSUMER,
            attributes={
                "headrace.request_id": request.request_id,
                "headrace.queue_class": request.queue_class.value,
                "gen_ai.operation.name": "chat",
                "gen_ai.request.model": request.model,
            },
        )
        return _Held(request, [place], traceparent_of(span) or traceparent, span)

    async def _resume(self, request_ids: list[str]) -> None:
        """Queue requests that an earlier scheduler may have dispatched, as far as they have come."""
        if not request_ids:
            return
        states = await until_done(lambda: self._look(request_ids), "look at streams")
        now_ms = self.clock.now_ms()
        for request_id, (last, holder) in zip(request_ids, states, strict=True):
            held = self._held.get(request_id)
            if held is None:
                continue
            held.checked = True
            if last is None or last.is_seal:
                self._end(request_id, None)
                continue
            self.policy.queued(_job(held.record), now_ms)
            self._catch_up(request_id, last, holder, now_ms)

    def _catch_up(self, request_id: str, last: StreamId, holder: str | None, now_ms: int) -> None:
        if holder is not None or last.attempt:
            self.delays.left(request_id)
        if holder is not None:
            held = self._held[request_id]
            held.worker_id, held.attempt = holder, last.attempt
            self.policy.adopted(request_id, holder, last.attempt, now_ms)
        elif last.attempt:
            self.policy.orphaned(request_id, last.attempt, now_ms)

    async def _look(self, request_ids: list[str]) -> list[tuple[StreamId | None, str | None]]:
        """Last id and lease holder of each stream. A seal deletes the lease, so the lease is read first."""
        holders = await self.streams.lease_holders(request_ids)
        last_ids = await self.streams.last_ids(request_ids)
        return list(zip(last_ids, holders, strict=True))

    def heard(self, pool: str, event: WorkerEvent) -> None:
        """A worker's event: its capacity, requests that it has sealed and whose outcome it publishes, and
        requests that it hands over, which wait for another worker from now on.
        """
        now_ms = self.clock.now_ms()
        self.policy.worker_seen(pool, event, now_ms)
        for request_id in event.finished:
            held = self._held.get(request_id)
            if held is not None and not held.ending:
                self._forget(request_id)
        for request_id in event.handed_over:
            held = self._held.get(request_id)
            # Told again, it may be of an attempt after which another worker has it already.
            if held is not None and held.worker_id == event.worker_id:
                self.policy.orphaned(request_id, 0, now_ms)

    def lose(self, kept: Callable[[str, int], bool]) -> None:
        """Partitions went to another scheduler: forget the requests that came from them."""
        for request_id, held in list(self._held.items()):
            held.places[:] = [p for p in held.places if kept(p.topic, p.partition)]
            if not held.places:
                self._forget(request_id)

    def react(self) -> None:
        """Let the policy decide, and set its effects going. Called after every event; cheap without one."""
        for effect in self.policy.decide(self.clock.now_ms()):
            match effect:
                case Dispatch():
                    self._outbox.append(effect)
                case Expire():
                    self._end(effect.request_id, _EXPIRED)
                case GiveUp():
                    self._end(effect.request_id, _WORKER_LOST)
                case Preempt():
                    self._spawn(self._preempt(effect))
        if self._outbox:
            self._outgoing.set()

    async def probe(self) -> None:
        """Ask Redis after requests in flight that were not heard of; the policy judges the answers.

        Raises:
            StreamsUnavailable: nothing is known, nothing is judged.
        """
        due = self.policy.to_probe(self.clock.now_ms())
        if not due:
            return
        states = await self._look(due)
        now_ms = self.clock.now_ms()
        for request_id, (last, holder) in zip(due, states, strict=True):
            if last is None or last.is_seal:
                self._end(request_id, None)
            else:
                self.policy.probed(request_id, holder, last.attempt, now_ms)

    async def look_for_readers(self) -> None:
        """End waiting requests that all readers have left. One round trip for a bounded part of them.

        Raises:
            StreamsUnavailable: nothing is known, nothing is ended.
        """
        ids = self._leaving.turn([i for i, h in self._held.items() if self._may_be_left(i, h)])
        if not ids:
            return
        now_ms, sightings = await self.presence.look(ids)
        for request_id, sighting in zip(ids, sightings, strict=True):
            held = self._held.get(request_id)
            if held is None or not self._may_be_left(request_id, held):
                continue
            if self._leaving.observe(held.record, sighting, now_ms):
                LEFT_REQUESTS.labels(STAGE).inc()
                log.info("all readers left", extra={"request_id": request_id})
                self.policy.ended(request_id)
                self._end(request_id, _LEFT)
        self.react()

    def _may_be_left(self, request_id: str, held: _Held) -> bool:
        """Whether it waits here and has a grace time; those that run are watched by their workers."""
        grace_ms = held.record.leave_grace_ms
        return grace_ms is not None and not held.ending and self.policy.is_waiting(request_id)

    def backlog(self, pool: str) -> int:
        """Choices of the requests that wait here for a worker of ``pool``."""
        return sum(
            held.record.sampling.n
            for request_id, held in self._held.items()
            if held.record.pool == pool and self.policy.is_waiting(request_id)
        )

    def held_ids(self) -> list[str]:
        """The requests that are in this scheduler's hands."""
        return list(self._held)

    async def deliver(self) -> None:
        """Perform dispatches for ever, in the order they were decided; one round trip for all at hand."""
        while True:
            await self._outgoing.wait()
            self._outgoing.clear()
            batch = [d for d in self._outbox if self._is_open(d.request_id)]
            self._outbox.clear()
            if batch:
                await self._deliver(batch)

    async def _deliver(self, batch: list[Dispatch]) -> None:
        """Write ``0-3`` and publish the dispatches.

        A request that comes straight from moderation goes to its worker while ``0-3`` is being written:
        should it have been sealed, the worker's ``1-0`` is refused before any work; should it run already
        (its record came twice), the worker leaves it to the living one. All others are looked at first.
        """
        at_once = [d for d in batch if self._straight_from_moderation(d)]
        if at_once:
            self._spawn(self._send(at_once))
        sent = {d.request_id for d in at_once}
        try:
            results = await self.streams.append([self._dispatched(d) for d in batch])
            unsure = [
                d.request_id
                for d, result in zip(batch, results, strict=True)
                if result is Appended.FENCED and not self._checked(d.request_id)
            ]
            states = dict(zip(unsure, await self._look(unsure), strict=True)) if unsure else {}
        except StreamsUnavailable as error:
            await self._undelivered([d for d in batch if d.request_id not in sent], error)
            return
        now_ms = self.clock.now_ms()
        ready: list[Dispatch] = []
        for dispatch, result in zip(batch, results, strict=True):
            request_id = dispatch.request_id
            held = self._held.get(request_id)
            if held is None or held.ending:
                continue
            held.checked = True
            last, holder = states.get(request_id, (DISPATCHED, None))
            if result is Appended.SEALED or result is Appended.GONE or last is None or last.is_seal:
                self._end(request_id, None)
            elif holder is not None or last.attempt > (request_id in sent):
                # A second record of a request that runs, or ran, already. An attempt 1 without a lease
                # may be the one we have just sent: it has its lease, or is probed, soon.
                self._catch_up(request_id, last, holder, now_ms)
            elif request_id not in sent:
                ready.append(dispatch)
        if ready:
            self._spawn(self._send(ready))
        if len(ready) + len(sent) < len(batch):
            self.react()

    def _straight_from_moderation(self, dispatch: Dispatch) -> bool:
        held = self._held.get(dispatch.request_id)
        return (
            held is not None
            and not held.checked
            and dispatch.attempt == 1
            and self.clock.now_ms() - held.record.moderated_ms < STRAIGHT_MS
        )

    def _dispatched(self, dispatch: Dispatch) -> tuple[str, StreamId, Dispatched]:
        held = self._held.get(dispatch.request_id)
        prompt_tokens = len(held.record.prompt_token_ids) if held is not None else None
        entry = Dispatched(worker_id=dispatch.worker_id, prompt_tokens=prompt_tokens)
        return dispatch.request_id, DISPATCHED, entry

    def _is_open(self, request_id: str) -> bool:
        held = self._held.get(request_id)
        return held is not None and not held.ending

    def _checked(self, request_id: str) -> bool:
        held = self._held.get(request_id)
        return held is not None and held.checked

    async def _send(self, batch: list[Dispatch]) -> None:
        results = await asyncio.gather(*(self._send_one(d) for d in batch), return_exceptions=True)
        lost: list[Dispatch] = []
        for dispatch, result in zip(batch, results, strict=True):
            if isinstance(result, PublishError):
                lost.append(dispatch)
            elif result is not None:
                raise result
        if lost:
            await self._undelivered(lost, PublishError(self.topics.dispatch("*")))

    async def _send_one(self, dispatch: Dispatch) -> None:
        held = self._held.get(dispatch.request_id)
        if held is None:
            return
        record = held.record
        held.worker_id, held.attempt = dispatch.worker_id, dispatch.attempt
        now_ms = self.clock.now_ms()
        value = DispatchRecord.model_construct(
            **record.__dict__,
            attempt=dispatch.attempt,
            worker_id=dispatch.worker_id,
            dispatched_ms=now_ms,
            scheduler_id=self.scheduler_id,
        ).encode()
        traceparent = held.traceparent
        held.close_span()
        await self.publisher.send(
            self.topics.dispatch(record.pool),
            value,
            key=record.request_id,
            partition=self.topics.partition_for(dispatch.slot, record.request_id),
            headers=trace_headers(traceparent),
        )
        _count_tokens(dispatch, len(record.prompt_token_ids))
        if dispatch.attempt == 1:
            self.delays.dispatched(record.request_id, now_ms)
            QUEUE_WAIT.labels(record.queue_class.value).observe(
                max(0, now_ms - record.moderated_ms) / 1000
            )
        else:
            REDISPATCHES.inc()
            log.info(
                "dispatched again",
                extra={
                    "request_id": record.request_id,
                    "attempt": dispatch.attempt,
                    "worker_id": dispatch.worker_id,
                },
            )

    async def _preempt(self, wish: Preempt) -> None:
        """Ask a worker to make room; what is lost of it costs time only."""
        held = self._held.get(wish.request_id)
        if held is None or held.ending or held.worker_id != wish.worker_id:
            return
        value = PreemptRecord(
            preempted_id=wish.request_id, attempt=held.attempt, worker_id=wish.worker_id
        ).encode()
        try:
            await self.publisher.send(
                self.topics.dispatch(held.record.pool),
                value,
                key=wish.request_id,
                partition=self.topics.partition_for(wish.slot, wish.request_id),
                headers=list(PREEMPT_HEADERS),
            )
        except PublishError as error:
            log.warning("no room asked for", extra={"error": str(error)[:200]})

    async def _undelivered(self, batch: list[Dispatch], error: Exception) -> None:
        log.warning("not dispatched", extra={"requests": len(batch), "error": str(error)[:200]})
        await asyncio.sleep(TROUBLE_PAUSE_SECONDS)
        now_ms = self.clock.now_ms()
        for dispatch in batch:
            self.policy.undelivered(dispatch.request_id, now_ms)
        self.react()

    def _end(self, request_id: str, terminal: Terminal | None) -> None:
        """End a request: seal it (None: it is sealed, or its stream is gone) and publish the outcome."""
        held = self._held.get(request_id)
        if held is not None and not held.ending:
            held.ending = True
            self._spawn(self._ended(request_id, held, terminal))

    async def _ended(self, request_id: str, held: _Held, terminal: Terminal | None) -> None:
        async with self._gate:
            if terminal is None:
                status = await self._endings.publish(held.record, held.traceparent)
            else:
                status = await self._endings.end(held.record, terminal, held.traceparent)
        held.close_span(status.value if status in (Status.FAILED, Status.EXPIRED) else None)
        if self._held.get(request_id) is held:
            self._forget(request_id)
            self.react()

    def _forget(self, request_id: str) -> None:
        held = self._held.pop(request_id)
        held.close_span()
        self._leaving.forget(request_id)
        self.delays.left(request_id)
        self.policy.ended(request_id)
        for place in held.places:
            place.done()

    async def _bury(self, record: ConsumerRecord, place: Place, error: RecordError) -> None:
        DEAD_LETTERS.labels(STAGE, error.reason).inc()
        request_id = error.request_id
        await until_done(
            lambda: self.publisher.dead_letter(self.topics.deadletter, STAGE, record, error),
            "dead-letter",
        )
        if request_id is not None:
            await self._endings.end_unread(request_id, _BAD_RECORD)
        place.done()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._settled)

    def _settled(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # A bug of ours: the request stays held and is redelivered after a restart.
            log.error("an effect failed", exc_info=task.exception())

    async def finish(self, seconds: float) -> None:
        """Wait up to ``seconds`` for effects under way, then cancel them: what is left is redelivered."""
        tasks = set(self._tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            await end_tasks(late)


def _count_tokens(dispatch: Dispatch, prompt_tokens: int) -> None:
    """Where the tokens of a prompt that was dispatched are thought to come from."""
    cached = dispatch.held_tokens + dispatch.tier_tokens
    for source, tokens in (
        ("worker", dispatch.held_tokens),
        ("tier", dispatch.tier_tokens),
        ("computed", max(0, prompt_tokens - cached)),
    ):
        DISPATCHED_TOKENS.labels(source).inc(tokens)


def _job(record: QueuedRecord) -> Job:
    return Job(
        request_id=record.request_id,
        queue_class=record.queue_class,
        pool=record.pool,
        tenant=record.tenant,
        choices=record.sampling.n,
        prompt_tokens=len(record.prompt_token_ids),
        queued_ms=record.moderated_ms,
        deadline_ms=record.deadline_ms,
        output_tokens=record.sampling.n * (record.sampling.max_tokens or 0),
        prefix_hashes=tuple(record.prefix_hashes),
        conversation_id=record.conversation_id,
        # As workers judge it, but for what only some engines cannot do (``Engine.continues``).
        continues=record.sampling.n == 1 and record.sampling.json_schema is None,
    )
