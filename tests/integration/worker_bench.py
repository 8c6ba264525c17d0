"""Workers as processes of their own, on real Kafka and Redis, fed by hand with dispatch records."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio as redis

from contracts.entries import Accepted, Dispatched, Moderated
from contracts.identity import make_request_id
from contracts.records import DispatchRecord, OutcomeRecord, QueuedRecord, Sampling, decode
from contracts.reply import Reply
from contracts.sim_tokens import sim_token_ids
from contracts.stream_ids import DISPATCHED, MODERATED
from contracts.tiers import QueueClass
from contracts.worker_events import WorkerEvent
from infra.embedded import die_with_parent
from infra.kafka import Headers, Publisher, make_consumer
from infra.settings import Settings
from infra.stream_redis import RedisTokenStreams, connect
from infra.topics import ensure_topics
from infra.worker_feed_redis import WorkerFeed

PROJECT = Path(__file__).resolve().parents[2]
POOL = "default"


def now_ms() -> int:
    return int(time.time() * 1000)


async def eventually(condition: Callable[[], Awaitable[Any]], what: str, seconds: float = 15.0) -> Any:
    """The first true value of ``condition``, asked until the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := await condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)
    return value


@dataclass
class WorkerProcess:
    process: subprocess.Popen[bytes]
    worker_id: str
    slot: int
    log: Path


@dataclass
class WorkerBench:
    settings: Settings
    folder: Path
    client: redis.Redis
    streams: RedisTokenStreams
    feed: WorkerFeed
    publisher: Publisher
    workers: list[WorkerProcess] = field(default_factory=list)

    async def start_worker(self) -> WorkerProcess:
        known = {event.worker_id for event in await self.events()}
        config = self.folder / "config.json"
        config.write_text(self.settings.model_dump_json())
        log_file = self.folder / f"worker-{len(self.workers)}.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-m", "workers", "--config", str(config)],
                cwd=PROJECT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        found = WorkerProcess(process, "", -1, log_file)
        self.workers.append(found)

        async def heard() -> WorkerEvent | None:
            assert process.poll() is None, log_file.read_text()[-2_000:]
            return next((e for e in await self.events() if e.worker_id not in known), None)

        event = await eventually(heard, "a heartbeat of the new worker", 30)
        found.worker_id, found.slot = event.worker_id, event.slot
        return found

    async def events(self) -> list[WorkerEvent]:
        return (await self.feed.recent(5_000))[1]

    async def accept(self, *, choices: int = 1) -> str:
        """A request as gateway, moderation and scheduler leave it."""
        rid = make_request_id(now_ms(), secrets.token_bytes(10))
        accepted = Accepted(tenant="t", tier="paid", model="m", created_ms=now_ms(), choices=choices)
        await self.streams.create(rid, accepted)
        await self.streams.append(
            [(rid, MODERATED, Moderated(prompt_tokens=1)), (rid, DISPATCHED, Dispatched(worker_id="w"))]
        )
        return rid

    def record(self, rid: str, text: str, attempt: int = 1, **sampling: Any) -> DispatchRecord:
        return DispatchRecord(
            request_id=rid,
            tenant="t",
            key_id="k",
            tier="paid",
            queue_class=QueueClass.INTERACTIVE,
            model=next(iter(self.settings.models)),
            pool=POOL,
            created_ms=now_ms(),
            deadline_ms=now_ms() + 60_000,
            sampling=Sampling(**{"max_tokens": 20, **sampling}),
            prompt_token_ids=sim_token_ids(text),
            moderated_ms=now_ms(),
            attempt=attempt,
            worker_id="w",
            dispatched_ms=now_ms(),
        )

    async def dispatch(self, worker: WorkerProcess, record: DispatchRecord) -> None:
        await self.raw(worker, record.encode(), record.request_id)

    async def raw(
        self, worker: WorkerProcess, value: bytes, request_id: str = "", headers: Headers | None = None
    ) -> None:
        topics = self.settings.kafka.topics
        assert worker.slot is not None
        partition = topics.partition_for(worker.slot, request_id)
        await self.publisher.send(topics.dispatch(POOL), value, partition=partition, headers=headers)

    async def generate(self, worker: WorkerProcess, text: str, **sampling: Any) -> Reply:
        rid = await self.accept()
        await self.dispatch(worker, self.record(rid, text, **sampling))
        return await self.sealed(rid)

    async def reply(self, rid: str) -> Reply:
        return Reply().extend(await self.streams.read_all(rid))

    async def sealed(self, rid: str, seconds: float = 15.0) -> Reply:
        async def ended() -> Reply | None:
            found = await self.reply(rid)
            return found if found.terminal is not None else None

        reply: Reply = await eventually(ended, f"the seal of {rid}", seconds)
        return reply

    async def tokens_out(self, rid: str, count: int) -> Reply:
        async def enough() -> Reply | None:
            found = await self.reply(rid)
            return found if found.tokens_out >= count else None

        reply: Reply = await eventually(enough, f"{count} tokens of {rid}")
        return reply

    async def outcomes(self, *rids: str) -> dict[str, OutcomeRecord]:
        """The outcomes of these requests, once all are published."""
        return {
            r.request_id: r for r in await self._records(self.settings.kafka.topics.outcomes, set(rids))
        }

    async def _records(self, topic: str, rids: set[str]) -> list[OutcomeRecord]:
        consumer = make_consumer(self.settings.kafka, group=None, client_id="test")
        consumer.subscribe([topic])
        await consumer.start()
        found: list[OutcomeRecord] = []
        try:
            async with asyncio.timeout(15):
                async for record in consumer:
                    found.append(decode(OutcomeRecord, record.value))
                    if rids <= {f.request_id for f in found}:
                        break
        finally:
            await consumer.stop()
        return found

    async def dead_letters(self, count: int) -> list[dict[str, Any]]:
        consumer = make_consumer(self.settings.kafka, group=None, client_id="test")
        consumer.subscribe([self.settings.kafka.topics.deadletter])
        await consumer.start()
        found: list[dict[str, Any]] = []
        try:
            async with asyncio.timeout(15):
                async for record in consumer:
                    found.append(json.loads(record.value))
                    if len(found) == count:
                        break
        finally:
            await consumer.stop()
        return found


async def queue(bench: WorkerBench, queue_class: QueueClass, text: str, tokens: int) -> QueuedRecord:
    """A request as gateway and moderation leave it."""
    rid = make_request_id(now_ms(), secrets.token_bytes(10))
    dispatched = bench.record(rid, text, max_tokens=tokens)
    record = QueuedRecord(**{**dispatched.model_dump(), "queue_class": queue_class})
    await bench.streams.create(
        rid, Accepted(tenant="t", tier="paid", model=record.model, created_ms=record.created_ms)
    )
    await bench.streams.append([(rid, MODERATED, Moderated(prompt_tokens=1))])
    topic = bench.settings.kafka.topics.queue(queue_class)
    await bench.publisher.send(topic, record.encode(), key=rid)
    return record


@asynccontextmanager
async def worker_bench(settings: Settings, folder: Path) -> AsyncIterator[WorkerBench]:
    await ensure_topics(settings)
    client = connect(settings.redis)
    publisher = Publisher(settings.kafka)
    await publisher.start()
    bench = WorkerBench(
        settings,
        folder,
        client,
        RedisTokenStreams(client, settings.streams),
        WorkerFeed(client, POOL),
        publisher,
    )
    try:
        yield bench
    finally:
        for worker in bench.workers:
            if worker.process.poll() is None:
                os.kill(worker.process.pid, 9)
            worker.process.wait(10)
        await publisher.stop()
        await client.aclose()
