"""A bench for one stage: its topics, its streams, and a tap on what it publishes."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord

from contracts.entries import Accepted
from contracts.identity import make_request_id
from contracts.records import Message, QueuedRecord, RequestRecord, Sampling
from contracts.reply import Reply
from contracts.tiers import QueueClass
from infra.embedded import BROKER_FETCH_MAX_WAIT_MS, BROKER_SESSION_TIMEOUT_MS
from infra.kafka import Publisher, make_consumer
from infra.role import Role
from infra.settings import Settings, development, parse
from infra.stream_redis import RedisTokenStreams, connect
from infra.tasks import end_tasks
from infra.topics import ensure_topics

MODEL = "headrace-sim"


def now_ms() -> int:
    return int(time.time() * 1000)


def stage_settings(kafka: str, redis_server: str, database: int, **sections: Any) -> Settings:
    """Settings with topics and a database of their own."""
    raw: dict[str, Any] = development("sim").model_dump(mode="json")
    raw["kafka"] |= {
        "bootstrap": kafka,
        "topic_prefix": f"s{uuid.uuid4().hex[:12]}",
        "partitions": 2,
        "worker_slots": 4,
        "fetch_max_wait_ms": BROKER_FETCH_MAX_WAIT_MS,
        "session_timeout_ms": BROKER_SESSION_TIMEOUT_MS,
        "idempotent": False,
    }
    raw["redis"] |= {"url": f"redis://{redis_server}/{database}"}
    for name, value in sections.items():
        raw[name] = raw[name] | value
    return parse(raw)


async def until(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
    """The first true value of ``condition``; it may be a coroutine function."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def running(role: Role, *, drain: bool = True) -> AsyncIterator[asyncio.Task[None]]:
    """A started, ready role; yields its ``run`` task. Without ``drain`` it ends as if killed."""
    try:
        await role.start()
        await until(lambda: _ready(role), "role ready", 40)
        work = asyncio.ensure_future(role.run())
        try:
            yield work
        finally:
            await end_tasks([work])
            if drain:
                await role.drain()
    finally:
        await role.stop()


async def _ready(role: Role) -> bool:
    return await role.not_ready() is None


class Tap:
    """Keeps every record of some topics, from their beginning."""

    def __init__(self, settings: Settings, topics: list[str]) -> None:
        self.records: list[ConsumerRecord] = []
        self._topics = topics
        self._consumer: AIOKafkaConsumer = make_consumer(settings.kafka, group=None, client_id="tap")
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._consumer.subscribe(self._topics)
        await self._consumer.start()
        self._task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while True:
            for records in (await self._consumer.getmany(timeout_ms=200)).values():
                self.records += records

    async def stop(self) -> None:
        assert self._task is not None
        await end_tasks([self._task])
        await self._consumer.stop()

    def of(self, request_id: str) -> list[ConsumerRecord]:
        return [r for r in self.records if r.key == request_id.encode()]


class Bench:
    """Everything around a stage: streams, publisher, and taps by topic."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.topics = settings.kafka.topics
        self.redis: Any = connect(settings.redis)
        self.streams = RedisTokenStreams(self.redis, settings.streams)
        self.publisher = Publisher(settings.kafka)
        self.queue = Tap(settings, list(self.topics.queues))
        self.outcomes = Tap(settings, [self.topics.outcomes])
        self.deadletter = Tap(settings, [self.topics.deadletter])
        self.dispatch = Tap(settings, [self.topics.dispatch("default")])

    @property
    def _taps(self) -> list[Tap]:
        return [self.queue, self.outcomes, self.deadletter, self.dispatch]

    async def __aenter__(self) -> Bench:
        await ensure_topics(self.settings)
        await self.redis.flushdb()
        await self.publisher.start()
        for tap in self._taps:
            await tap.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tap in self._taps:
            await tap.stop()
        await self.publisher.stop()
        await self.redis.aclose()

    async def accepted(self, record: RequestRecord | QueuedRecord) -> None:
        """What the gateway does first."""
        await self.streams.create(
            record.request_id,
            Accepted(
                tenant=record.tenant,
                tier=record.tier,
                model=record.model,
                created_ms=record.created_ms,
                deadline_ms=record.deadline_ms,
                key_id=record.key_id,
                conversation_id=record.conversation_id,
            ),
        )

    async def reply(self, request_id: str) -> Reply:
        return Reply().extend(await self.streams.read_all(request_id))

    async def sealed(self, request_id: str) -> Reply:
        """The reply once it has ended."""

        async def ended() -> Reply | None:
            reply = await self.reply(request_id)
            return reply if reply.terminal is not None else None

        found: Reply = await until(ended, f"seal of {request_id}")
        return found


def _base(**fields: Any) -> dict[str, Any]:
    created = fields.pop("created_ms", now_ms())
    return {
        "request_id": make_request_id(created, os.urandom(10)),
        "tenant": "t1",
        "key_id": "k1",
        "tier": "paid",
        "queue_class": QueueClass.INTERACTIVE,
        "model": MODEL,
        "pool": "default",
        "created_ms": created,
        "deadline_ms": created + 60_000,
        "sampling": Sampling(max_tokens=8),
        **fields,
    }


def request_record(text: str = "hello", **fields: Any) -> RequestRecord:
    messages = [Message(role="user", content=text)]
    return RequestRecord(**_base(messages=messages, turn=messages, **fields))


def queued_record(**fields: Any) -> QueuedRecord:
    base = _base(**fields)
    return QueuedRecord(**{"prompt_token_ids": [1, 2, 3], "moderated_ms": base["created_ms"], **base})
