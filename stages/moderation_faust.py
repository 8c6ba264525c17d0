"""The moderation stage: what happens to each record of ``requests``, and the Faust app around it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from opentelemetry.trace import Span, SpanKind

from contracts.entries import Moderated, Terminal
from contracts.errors import ApiError, ErrorCode, RecordError, error_body
from contracts.records import QueuedRecord, RequestRecord, decode
from contracts.stream_ids import DISPATCHED, MODERATED, StreamId
from contracts.tiers import Status
from contracts.topics import Topics
from infra.kafka import Publisher
from infra.moderation.guard import ModerationGuard
from infra.moderation.moderators import make_guard
from infra.settings import BUILTIN_SIM, ModelSettings, Settings
from infra.stream_redis import RedisTokenStreams, connect
from infra.telemetry import (
    DEAD_LETTERS,
    HOP,
    end_span,
    start_span,
    trace_headers,
    traceparent_from,
    traceparent_of,
)

from .errors import PromptRefused, RoleStuck
from .faust_app import Incoming, StageApp
from .moderation import queued_record, status_of, texts_to_check
from .outcomes import Endings
from .protocols import PromptTokenizer
from .retry import until_done
from .shared_prompts import SharedPrompts
from .tokenizer_hf import HfTokenizer
from .tokenizer_sim import SimTokenizer

log = logging.getLogger(__name__)

STAGE = "moderation"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class ModerationStage:
    """Takes one record to its effect: queued, refused, expired or dead-lettered.

    :meth:`handle` returns when the effect is durable, and only then may the record be acknowledged. It
    raises nothing but ``CancelledError``: trouble with Redis or Kafka is waited out in place, a record
    that cannot be handled goes to the dead-letter topic and its client is told. Redelivery is harmless.
    """

    def __init__(
        self,
        *,
        topics: Topics,
        models: Mapping[str, ModelSettings],
        tokenizers: Mapping[str, PromptTokenizer],
        guard: ModerationGuard,
        streams: RedisTokenStreams,
        publisher: Publisher,
        shared_prompts: Collection[str] = (),
    ) -> None:
        """The stage.

        Args:
            shared_prompts: see :class:`stages.shared_prompts.SharedPrompts`.
        """
        self._topics = topics
        self._models = models
        self._tokenizers = tokenizers
        self._guard = guard
        self._shared = SharedPrompts(shared_prompts, tokenizers)
        self._streams = streams
        self._publisher = publisher
        self._endings = Endings(streams, publisher, topics.outcomes)

    async def handle(self, record: Incoming) -> None:
        """Take one record of ``requests`` to its effect."""
        span = start_span("moderate", traceparent_from(record.headers), kind=SpanKind.CONSUMER)
        failure: str | None = None
        try:
            failure = await self._decoded(record, span)
        except RecordError as error:
            failure = error.reason
            await self._bury(record, error)
        except Exception as error:
            # A bug of ours: this record is set aside, the next one is served.
            failure = type(error).__name__
            log.exception(
                "record not handled",
                extra={
                    "topic": record.topic,
                    "partition": record.partition,
                    "offset": record.offset,
                },
            )
            await self._set_aside(record, failure)
        finally:
            end_span(span, failure)

    async def _decoded(self, record: Incoming, span: Span) -> str | None:
        request = decode(RequestRecord, record.value)
        span.set_attribute("headrace.request_id", request.request_id)
        span.set_attribute("gen_ai.operation.name", "chat")
        span.set_attribute("gen_ai.request.model", request.model)
        traceparent = traceparent_of(span) or traceparent_from(record.headers)
        verdict, last = await asyncio.gather(self._judged(request), self._last_id(request.request_id))
        if last is None or last.is_seal:
            await self._endings.publish(request, traceparent)
            return None
        if last >= DISPATCHED:
            return None  # redelivered, and the scheduler has it already
        if isinstance(verdict, Terminal):
            status = await self._endings.end(request, verdict, traceparent)
            return None if status is Status.CANCELLED else str(verdict.error and verdict.error.code)
        # A redelivered request may be queued already: nobody knows, and the scheduler knows it by its id.
        await self._pass_on(verdict, traceparent)
        HOP.labels(STAGE).observe(max(0, _now_ms() - request.created_ms) / 1000)
        return None

    async def _judged(self, request: RequestRecord) -> QueuedRecord | Terminal:
        """The request as it is queued, or how it ends."""
        if _now_ms() >= request.deadline_ms:
            error = error_body(ErrorCode.DEADLINE_EXCEEDED, "The request waited too long to be started.")
            return Terminal(status=Status.EXPIRED, error=error)
        try:
            return await self._prepared(request)
        except ApiError as refusal:
            return Terminal(status=status_of(refusal), error=refusal.body)

    async def _last_id(self, request_id: str) -> StreamId | None:
        [last] = await until_done(lambda: self._streams.last_ids([request_id]), "read the last id")
        return last

    async def _prepared(self, request: RequestRecord) -> QueuedRecord:
        """Check and tokenize; raises :class:`ApiError` where the request goes no further."""
        model = self._models.get(request.model)
        if model is None:
            raise ApiError(ErrorCode.MODEL_NOT_FOUND, "The model is no longer served.", param="model")
        await self._guard.clear(texts_to_check(request.messages))
        try:
            token_ids = await self._tokenizers[request.model].encode(request.messages)
        except PromptRefused as error:
            raise ApiError(ErrorCode.INVALID_VALUE, f"Sorry, {error}.", param="messages") from error
        shared = await self._shared.tokens_of(request.model, request.messages, token_ids)
        return queued_record(request, token_ids, model, _now_ms(), shared)

    async def _pass_on(self, queued: QueuedRecord, traceparent: str | None) -> None:
        """Write ``0-2`` and queue the request, at once: each is idempotent, and their order does not matter.

        The scheduler may be quicker and refuse us ``0-2`` by its ``0-3``, which says the same.
        """
        entry = Moderated(prompt_tokens=len(queued.prompt_token_ids))
        writes = [(queued.request_id, MODERATED, entry)]
        value = queued.encode()
        await asyncio.gather(
            until_done(lambda: self._streams.append(writes), "append 0-2"),
            until_done(
                lambda: self._publisher.send(
                    self._topics.queue(queued.queue_class),
                    value,
                    key=queued.request_id,
                    headers=trace_headers(traceparent),
                ),
                "queue",
            ),
        )

    async def _bury(self, record: Incoming, error: RecordError) -> None:
        await self._dead_letter(record, error)
        if error.request_id is not None:
            await self._endings.end_unread(error.request_id, _not_processed(ErrorCode.BAD_RECORD))

    async def _set_aside(self, record: Incoming, failure: str) -> None:
        try:
            request = decode(RequestRecord, record.value)
        except RecordError as error:
            await self._bury(record, error)
            return
        await self._dead_letter(record, RecordError("handler_error", failure, request.request_id))
        terminal = _not_processed(ErrorCode.INTERNAL)
        await self._endings.end(request, terminal, traceparent_from(record.headers))

    async def _dead_letter(self, record: Incoming, error: RecordError) -> None:
        DEAD_LETTERS.labels(STAGE, error.reason).inc()
        await until_done(
            lambda: self._publisher.dead_letter(self._topics.deadletter, STAGE, record, error),
            "dead-letter",
        )


def _not_processed(code: ErrorCode) -> Terminal:
    error = error_body(code, "The request could not be processed.")
    return Terminal(status=Status.FAILED, error=error)


class ModerationRole:
    """The moderation process (see :class:`infra.role.Role`)."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._redis = connect(settings.redis)
        self._publisher = Publisher(settings.kafka)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="moderation")
        self._streams = RedisTokenStreams(self._redis, settings.streams)
        self._app: StageApp | None = None

    async def start(self) -> None:
        """Load the classifier and the tokenizers, connect, join the group."""
        settings = self._settings
        await self._streams.ping()
        guard, tokenizers = await asyncio.to_thread(self._load)
        await self._publisher.start()
        topics = settings.kafka.topics
        stage = ModerationStage(
            topics=topics,
            models=settings.models,
            tokenizers=tokenizers,
            guard=guard,
            streams=self._streams,
            publisher=self._publisher,
            shared_prompts=settings.kv.shared_prompts.values(),
        )
        app_id = f"{topics.prefix}-{STAGE}"
        self._app = StageApp(settings.kafka, app_id, topics.requests, stage.handle)
        await self._app.start()

    def _load(self) -> tuple[ModerationGuard, dict[str, PromptTokenizer]]:
        guard = make_guard(self._settings.moderation, self._threads)
        return guard, {n: self._tokenizer(m) for n, m in self._settings.models.items()}

    def _tokenizer(self, model: ModelSettings) -> PromptTokenizer:
        if model.path == BUILTIN_SIM:
            return SimTokenizer(self._threads)
        return HfTokenizer(Path(model.path), self._threads)

    async def not_ready(self) -> str | None:
        """Why requests are not moderated right now."""
        if self._app is None:
            return "starting"
        await self._streams.ping()
        return self._app.not_ready()

    def reconfigure(self, settings: Settings) -> None:
        """See :class:`infra.role.Role`. Nothing of what can change concerns moderation."""

    async def run(self) -> None:
        """Ends only when the Faust app has."""
        assert self._app is not None
        await self._app.until_broken()
        raise RoleStuck("the moderation app ended")

    async def drain(self) -> None:
        """Finish what is in hand."""
        if self._app is not None:
            await self._app.close(self._settings.drain_seconds)
            self._app = None

    async def stop(self) -> None:
        """See :class:`infra.role.Role`."""
        if self._app is not None:
            await self._app.close(0.0)
        await self._publisher.stop()
        await self._redis.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)
