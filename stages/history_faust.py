"""The history stage: outcomes become stored conversations, kept replies and usage counts."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Collection
from typing import Any

import redis.asyncio as redis
from opentelemetry.trace import SpanKind

from contracts.errors import RecordError
from contracts.records import OutcomeRecord, decode
from contracts.stored_reply import ended_reply
from contracts.topics import Topics
from infra.conversations_redis import Conversations
from infra.kafka import LogSilent, Publisher, make_reader, read_to_end
from infra.limits_redis import LimitCounters
from infra.settings import Settings
from infra.stored_replies_redis import StoredReplies
from infra.stream_redis import RedisTokenStreams, connect
from infra.tasks import end_tasks
from infra.telemetry import DEAD_LETTERS, REQUESTS, TOKENS, end_span, start_span, traceparent_from

from .errors import RoleStuck
from .faust_app import Incoming, StageApp
from .history import Recent, tier_label, worth_keeping, worth_rebuilding
from .reservations import Reservations
from .retry import until_done

log = logging.getLogger(__name__)

STAGE = "history"

#: Nobody waits for history (the intake reads what is not stored yet from token streams), so it does not poll
#: the embedded broker as the request path does, and gives way to it on a shared core.
UNHURRIED_FETCH_MS = 100
UNHURRIED_NICENESS = 5
#: Its absence says that Redis has lost the conversations.
EPOCH_KEY = "hr:history:epoch"
EPOCH_CHECK_SECONDS = 10.0
#: Outcomes stored at once while rebuilding.
REBUILD_AT_ONCE = 64
#: A rebuild that gets no record for so long, though there are more, starts over.
REBUILD_SILENCE_SECONDS = 30.0


class HistoryStage:
    """Takes one outcome to its effect: its turn and reply are stored, its limits settled, its usage counted.

    Storing and settling are idempotent by request id; counting is, within the last outcomes seen.
    :meth:`handle` raises nothing but ``CancelledError``, and returns when they are in Redis.
    """

    def __init__(
        self,
        topics: Topics,
        settings: Settings,
        conversations: Conversations,
        kept: StoredReplies,
        reservations: Reservations,
        publisher: Publisher,
    ) -> None:
        self._topics = topics
        self._reservations = reservations
        self._conversations = conversations
        self._kept = kept
        self._publisher = publisher
        self._recent = Recent()
        self.reconfigure(settings)

    def reconfigure(self, settings: Settings) -> None:
        """Go by these settings' tiers and limits from now on."""
        self._tiers: Collection[str] = settings.tiers
        self._has_limits = settings.has_limits

    async def handle(self, record: Incoming) -> None:
        """Take one record of ``outcomes`` to its effect."""
        span = start_span("history", traceparent_from(record.headers), kind=SpanKind.CONSUMER)
        failure: str | None = None
        try:
            outcome = decode(OutcomeRecord, record.value)
            span.set_attribute("headrace.request_id", outcome.request_id)
            span.set_attribute("headrace.status", outcome.status.value)
            await until_done(lambda: self._conversations.store(outcome), "store the turn")
            await keep_reply(self._kept, outcome)
            if self._has_limits:
                await self._reservations.settle(outcome)
            self._count(outcome)
        except RecordError as error:
            failure = error.reason
            await self._bury(record, error)
        except Exception as error:
            # A bug of ours: this record is set aside, the next one is served.
            failure = type(error).__name__
            log.exception(
                "outcome not handled",
                extra={"partition": record.partition, "offset": record.offset},
            )
            await self._bury(record, RecordError("handler_error", failure))
        finally:
            end_span(span, failure)

    def _count(self, outcome: OutcomeRecord) -> None:
        if not self._recent.is_new(outcome.request_id):
            return
        tier = tier_label(outcome.tier, self._tiers)
        REQUESTS.labels(tier, outcome.status.value).inc()
        TOKENS.labels(tier, "prompt").inc(outcome.usage.prompt_tokens)
        TOKENS.labels(tier, "completion").inc(outcome.usage.completion_tokens)

    async def _bury(self, record: Incoming, error: RecordError) -> None:
        DEAD_LETTERS.labels(STAGE, error.reason).inc()
        await until_done(
            lambda: self._publisher.dead_letter(self._topics.deadletter, STAGE, record, error),
            "dead-letter",
        )


async def keep_reply(kept: StoredReplies, outcome: OutcomeRecord) -> None:
    """Store the reply of a request that asked for it."""
    reply = ended_reply(outcome)
    if reply is not None:
        await until_done(lambda: kept.put(reply), "keep the reply")


class Rebuild:
    """Restores conversations and kept replies from the outcomes topic, from its beginning to its end now.

    Runs before the stage joins its group; outcomes that come meanwhile are read by the stage itself.
    """

    def __init__(self, settings: Settings, client: redis.Redis) -> None:
        self._settings = settings
        self._redis: Any = client
        self._conversations = Conversations(client, settings.history)
        self._kept = StoredReplies(client, settings.stored)

    async def lost(self) -> bool:
        """Whether Redis has lost the conversations (or never had any)."""
        return not await self._redis.exists(EPOCH_KEY)

    async def run(self) -> int:
        """Read everything, then set the epoch; returns the number of outcomes read.

        Raises:
            RoleStuck: the broker has stopped giving records.
        """
        kafka = self._settings.kafka
        consumer = make_reader(kafka, kafka.topics.outcomes, client_id="headrace-history-rebuild")
        count = 0
        try:
            await consumer.start()
            ends = await consumer.end_offsets(consumer.assignment())
            async for records in read_to_end(consumer, ends, REBUILD_SILENCE_SECONDS):
                for start in range(0, len(records), REBUILD_AT_ONCE):
                    await asyncio.gather(
                        *(self._store(r.value) for r in records[start : start + REBUILD_AT_ONCE])
                    )
                count += len(records)
        except LogSilent:
            raise RoleStuck("no outcomes to rebuild from") from None
        finally:
            await consumer.stop()
        await self._redis.set(EPOCH_KEY, int(time.time() * 1000))
        log.info("conversations rebuilt", extra={"outcomes": count})
        return count

    async def _store(self, value: bytes | None) -> None:
        try:
            outcome = decode(OutcomeRecord, value)
        except RecordError:
            return  # the stage dead-letters it when its turn comes, or has done so
        now_ms = int(time.time() * 1000)
        if worth_rebuilding(outcome, now_ms, self._settings.history.retention_seconds):
            await until_done(lambda: self._conversations.store(outcome), "store the turn")
        if worth_keeping(outcome, now_ms, self._settings.stored.retention_seconds):
            await keep_reply(self._kept, outcome)


class HistoryRole:
    """The history process (see :class:`infra.role.Role`)."""

    def __init__(self, settings: Settings, *, rebuild: bool = False) -> None:
        """Prepare; ``rebuild`` asks for a rebuild although Redis has lost nothing."""
        self._settings = settings
        self._forced = rebuild
        self._redis = connect(settings.redis)
        self._counting = connect(settings.limits_redis)
        self._reservations = Reservations(
            LimitCounters(self._counting, settings.limits.timeout_seconds),
            RedisTokenStreams(self._redis, settings.streams),
        )
        self._publisher = Publisher(settings.kafka)
        self._rebuild = Rebuild(settings, self._redis)
        self._stage: HistoryStage | None = None
        self._app: StageApp | None = None

    async def start(self) -> None:
        """Rebuild if needed, connect, join the group."""
        os.setpriority(os.PRIO_PROCESS, 0, UNHURRIED_NICENESS)
        if self._forced or await self._rebuild.lost():
            await self._rebuild.run()
            self._forced = False
        await self._publisher.start()
        topics = self._settings.kafka.topics
        stage = self._stage = HistoryStage(
            topics,
            self._settings,
            Conversations(self._redis, self._settings.history),
            StoredReplies(self._redis, self._settings.stored),
            self._reservations,
            self._publisher,
        )
        app_id = f"{topics.prefix}-{STAGE}"
        kafka = self._settings.kafka
        wait_ms = max(kafka.fetch_max_wait_ms, UNHURRIED_FETCH_MS)
        unhurried = kafka.model_copy(update={"fetch_max_wait_ms": wait_ms, "doorbells": None})
        self._app = StageApp(unhurried, app_id, topics.outcomes, stage.handle)
        await self._app.start()

    def reconfigure(self, settings: Settings) -> None:
        """See :class:`infra.role.Role`."""
        self._settings = settings
        if self._stage is not None:
            self._stage.reconfigure(settings)

    async def not_ready(self) -> str | None:
        """Why outcomes are not stored right now."""
        if self._app is None:
            return "starting"
        client: Any = self._redis
        await client.ping()
        return self._app.not_ready()

    async def run(self) -> None:
        """Ends when the Faust app has, or when Redis has lost the conversations: a new start rebuilds."""
        assert self._app is not None
        # In tasks of their own: a cancellation of this one must not be lost in a Redis command.
        watches: list[asyncio.Task[None]] = [
            asyncio.ensure_future(self._app.until_broken()),
            asyncio.ensure_future(self._until_lost()),
            asyncio.ensure_future(self._reservations.run()),
        ]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(watches)
        lost = watches[1] in done
        raise RoleStuck("Redis has lost the conversations" if lost else "the history app ended")

    async def _until_lost(self) -> None:
        while True:
            await asyncio.sleep(EPOCH_CHECK_SECONDS)
            try:
                if await self._rebuild.lost():
                    return
            except (redis.RedisError, OSError) as error:
                log.warning("epoch not read", extra={"error": type(error).__name__})

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
        await self._counting.aclose()
        await self._redis.aclose()
