"""What happens to one dispatched request, from its record until its position may be committed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from opentelemetry.trace import Span, SpanKind

from contracts.entries import StreamEntry, Terminal
from contracts.errors import ErrorCode, error_body
from contracts.outcome import make_outcome
from contracts.records import DispatchRecord
from contracts.reply import Reply
from contracts.tiers import Status
from contracts.token_stream import Appended, StreamsUnavailable
from infra.kafka import Publisher, PublishError
from infra.settings import WorkerSettings
from infra.telemetry import (
    ENGINE_TTFT,
    FENCED,
    PREEMPTED,
    TAKEOVERS,
    TPOT,
    TTFT,
    end_span,
    start_span,
    trace_headers,
)

from .generation import Ending, Generation
from .in_hand import InHand
from .leases import LeaseKeeper
from .leaving import LeaveWatch
from .protocols import Engine
from .takeover import (
    Broken,
    Decision,
    Expired,
    Finished,
    Foreign,
    Generate,
    Lost,
    NotContinuable,
    decide,
)
from .writer import StreamWriter

log = logging.getLogger(__name__)
T = TypeVar("T")

_LONGEST_PAUSE_SECONDS = 5.0
#: Times a start may be fenced by somebody else's before the request is left to them.
_STARTS = 3


class Streams(Protocol):
    """What a handler reads and writes outside the writer's pipelines."""

    async def read_all(self, request_id: str, page: int = 1_000) -> list[StreamEntry]:
        """The whole stream as it is now."""

    async def lease_holders(self, request_ids: list[str]) -> list[str | None]:
        """The worker that holds each request's lease."""

    async def seal(self, request_id: str, terminal: Terminal) -> Appended:
        """Write the terminal entry."""


@dataclass(frozen=True)
class Services:
    """What all handlers of a worker share.

    Attributes:
        in_hand: the requests that are handled right now.
        prefilled: called with the record of a request whose prompt the engine has prefilled.
        finished: called with the id of a request once its stream is sealed and its outcome published.
        handed_over: called with the id of a request that another worker may continue.
        give_up_seconds: how long the token streams may be unreachable before a request is given up.
        gate: bounds the handlers that use connections of their own at once.
    """

    worker_id: str
    model_revision: str
    settings: WorkerSettings
    engine: Engine
    streams: Streams
    writer: StreamWriter
    leases: LeaseKeeper
    leaving: LeaveWatch
    publisher: Publisher
    outcomes_topic: str
    in_hand: InHand
    prefilled: Callable[[DispatchRecord], None]
    finished: Callable[[str], None]
    handed_over: Callable[[str], None]
    give_up_seconds: float
    gate: asyncio.Semaphore


def handle(
    services: Services, record: DispatchRecord, traceparent: str | None
) -> Coroutine[Any, Any, None]:
    """Take a request in hand at once, and bring it to its effect.

    Returns:
        What is to be awaited; after that its position may be committed. Raises
        :class:`workers.errors.EngineDead` when the engine is gone; then the position must stay.
    """
    handler = _Handler(services, record, traceparent)
    services.in_hand.add(handler)
    return handler.run_to_its_end()


class _Handler:
    def __init__(self, services: Services, record: DispatchRecord, traceparent: str | None) -> None:
        self._s = services
        self.record = record
        self._rid = record.request_id
        self._traceparent = traceparent
        self._running: Generation | None = None
        self._latest: Generation | None = None
        self._preempted = False

    @property
    def generated(self) -> int:
        """See :class:`workers.in_hand.Taken`."""
        return self._latest.usage.completion_tokens if self._latest is not None else 0

    @property
    def prefilled(self) -> bool:
        """See :class:`workers.in_hand.Taken`."""
        return self._latest is not None and self._latest.last_token_at is not None

    def preempt(self) -> None:
        """See :class:`workers.in_hand.Taken`."""
        self._preempted = True
        if self._running is not None:
            self._running.hand_over()

    async def run_to_its_end(self) -> None:
        """Let go of the request when it has ended here, however."""
        try:
            await self._run()
        except StreamsUnavailable:
            # The scheduler holds the request until its seal, and finds no lease.
            log.error("request given up, token streams unreachable", extra={"request_id": self._rid})
        finally:
            self._s.in_hand.remove(self)

    async def _run(self) -> None:
        # The usual case needs no look at the stream: if the start is accepted, nobody was before us.
        first = self.record.attempt <= 1 and _now_ms() <= self.record.deadline_ms
        if first and await self._attempt(Generate(1), Reply()):
            return
        for _ in range(_STARTS):
            reply, holder = await self._look()
            decision = decide(
                self.record,
                reply,
                lease_holder=holder,
                worker_id=self._s.worker_id,
                continues=self._s.engine.continues(self.record.sampling),
                now_ms=_now_ms(),
            )
            if await self._do(decision, reply):
                return
        log.warning("request left to another worker", extra={"request_id": self._rid})

    async def _look(self) -> tuple[Reply, str | None]:
        async with self._s.gate:
            items = await self._retry(lambda: self._s.streams.read_all(self._rid))
            holders = await self._retry(lambda: self._s.streams.lease_holders([self._rid]))
        return Reply().extend(items), holders[0]

    async def _do(self, decision: Decision, reply: Reply) -> bool:
        """Act on a decision; False when the stream has changed meanwhile and must be read again."""
        match decision:
            case Generate():
                return await self._attempt(decision, reply)
            case Finished():
                await self._publish_outcome(reply)
            case Foreign():
                log.info("request runs elsewhere", extra={"request_id": self._rid})
            case Expired():
                error = error_body(ErrorCode.DEADLINE_EXCEEDED, "the request waited too long")
                await self._end(Terminal(status=Status.EXPIRED, error=error))
            case NotContinuable():
                error = error_body(
                    ErrorCode.WORKER_LOST,
                    "the worker was lost and this kind of reply cannot be continued",
                )
                await self._end(Terminal(status=Status.FAILED, error=error))
            case Broken():
                error = error_body(ErrorCode.STREAM_LOST, "a part of the reply's token stream was lost")
                await self._end(Terminal(status=Status.FAILED, error=error))
            case Lost():
                await self._lost()
        return True

    async def _attempt(self, plan: Generate, reply: Reply) -> bool:
        """Run an attempt; False when its start was refused."""
        if self._preempted:
            await self._hand_over()
            return True
        record, services = self.record, self._s
        generation = Generation(
            record,
            plan,
            reply,
            engine=services.engine,
            writer=services.writer,
            prefill_seconds=services.settings.prefill_seconds,
            hang_seconds=services.settings.hang_seconds,
            on_started=self._started,
            on_prefilled=lambda: services.prefilled(record),
        )
        began = time.monotonic()
        self._running = self._latest = generation
        generation.begin(services.worker_id, services.model_revision)
        span = self._span(plan)
        failure: str | None = "abandoned"
        try:
            ending = await generation.run()
            failure = None if ending in (Ending.SEALED, Ending.SEALED_ELSEWHERE) else ending.value
        except asyncio.CancelledError:
            failure = "handed_over"
            raise
        except Exception as error:
            failure = type(error).__name__
            raise
        finally:
            self._running = None
            services.leases.remove(generation)
            services.leaving.remove(generation)
            _describe(span, generation)
            end_span(span, failure)
        if not generation.started and ending not in (Ending.UNREACHABLE, Ending.HANDED_OVER):
            return False
        self._measure(generation, began)
        await self._conclude(generation, ending)
        return True

    def _started(self, generation: Generation) -> None:
        """``<a>-0`` is in the stream, perhaps only after the attempt is over."""
        if generation is not self._running:
            return
        self._s.leases.add(generation)
        self._s.leaving.add(generation)
        if generation.emitted:
            TAKEOVERS.inc()
            log.info(
                "reply continued", extra={"request_id": self._rid, "emitted": len(generation.emitted)}
            )

    async def _conclude(self, generation: Generation, ending: Ending) -> None:
        match ending:
            case Ending.SEALED:
                await self._publish_outcome(generation.reply, generation.first_token_at)
            case Ending.SEALED_ELSEWHERE:
                reply, _ = await self._look()
                await self._publish_outcome(reply, generation.first_token_at)
            case Ending.FENCED:
                FENCED.inc()
                log.info(
                    "attempt fenced", extra={"request_id": self._rid, "attempt": generation.attempt}
                )
            case Ending.GONE:
                await self._lost()
            case Ending.HANDED_OVER:
                await self._hand_over()
            case Ending.UNREACHABLE:
                raise StreamsUnavailable("generation")

    async def _hand_over(self) -> None:
        """Leave the request to others. Should the lease not go, they find out when it has run out."""
        await self._retry(lambda: self._s.leases.give_up(self._rid))
        PREEMPTED.inc()
        log.info("request handed over", extra={"request_id": self._rid})
        self._s.handed_over(self._rid)

    async def _end(self, terminal: Terminal) -> None:
        """Seal without an attempt of ours, and publish whatever terminal state results."""
        async with self._s.gate:
            result = await self._retry(lambda: self._s.streams.seal(self._rid, terminal))
        if result is Appended.GONE:
            await self._lost()
            return
        reply, _ = await self._look()
        await self._publish_outcome(reply)

    async def _lost(self) -> None:
        """There is no stream to seal: the outcome alone says how it ended."""
        log.error("token stream lost", extra={"request_id": self._rid})
        error = error_body(ErrorCode.STREAM_LOST, "the token stream of this request was lost")
        reply = Reply(terminal=Terminal(status=Status.FAILED, error=error))
        await self._publish_outcome(reply)

    async def _publish_outcome(self, reply: Reply, first_token_at: float | None = None) -> None:
        """Publish until acknowledged: the position stays open as long."""
        if reply.terminal is None:  # gone between its seal and our reading
            await self._lost()
            return
        now_ms = _now_ms()
        ttft_ms = None
        if first_token_at is not None and reply.attempts <= 1:
            ago = (time.monotonic() - first_token_at) * 1000
            ttft_ms = max(0, int(now_ms - ago - self.record.created_ms))
        value = make_outcome(self.record, reply, now_ms=now_ms, ttft_ms=ttft_ms).encode()
        pause = 0.1
        while True:
            try:
                await self._s.publisher.send(
                    self._s.outcomes_topic,
                    value,
                    key=self._rid,
                    headers=trace_headers(self._traceparent),
                )
                break
            except PublishError as error:
                log.warning(
                    "outcome not published", extra={"request_id": self._rid, "error": str(error)[:200]}
                )
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
        # Only now: on this the scheduler closes its position, and nobody else would publish the outcome.
        self._s.finished(self._rid)

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call until it works, for as long as the token streams may be away."""
        deadline = time.monotonic() + self._s.give_up_seconds
        pause = 0.05
        while True:
            try:
                return await call()
            except StreamsUnavailable:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    def _span(self, plan: Generate) -> Span:
        record = self.record
        return start_span(
            f"chat {record.model}",
            self._traceparent,
            kind=SpanKind.CONSUMER,
            attributes={
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "headrace",
                "gen_ai.request.model": record.model,
                "gen_ai.request.max_tokens": record.sampling.max_tokens or 0,
                "gen_ai.request.temperature": record.sampling.temperature,
                "gen_ai.request.top_p": record.sampling.top_p,
                "gen_ai.request.choice.count": record.sampling.n,
                "gen_ai.response.id": record.request_id,
                "headrace.worker.id": self._s.worker_id,
                "headrace.attempt": plan.attempt,
                "headrace.emitted_tokens": len(plan.emitted),
            },
        )

    def _measure(self, generation: Generation, began: float) -> None:
        first, last, new = generation.first_token_at, generation.last_token_at, generation.new_tokens
        if first is None or last is None:
            return
        ENGINE_TTFT.observe(first - began)
        if generation.attempt == 1:
            since_accepted = time.time() - self.record.created_ms / 1000 - (time.monotonic() - first)
            TTFT.labels(self.record.tier).observe(max(0.0, since_accepted))
        if new > 1:
            TPOT.labels(self.record.tier).observe((last - first) / (new - 1))


def _describe(span: Span, generation: Generation) -> None:
    usage = generation.usage
    span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
    span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
    terminal = generation.reply.terminal
    if terminal is not None:
        reasons = [r.value for r in terminal.finish_reasons]
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        span.set_attribute("headrace.status", terminal.status.value)


def _now_ms() -> int:
    return int(time.time() * 1000)
