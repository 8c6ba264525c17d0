"""The scheduler's shell asks workers for room, and hears what they hand over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from contracts.preempt import is_preempt, read_preempt
from contracts.records import DispatchRecord, decode
from contracts.token_stream import Appended
from contracts.topics import Topics
from contracts.worker_events import WorkerEvent
from infra.kafka import PublishError
from infra.tasks import end_tasks
from stages.protocols import Dispatch, Effect, Job, Preempt
from stages.scheduler import Scheduler
from tests.integration.stage_bench import queued_record

OTHER = "chatcmpl-" + "0" * 32


@dataclass
class ScriptedPolicy:
    """Returns the effects it is told to, once."""

    effects: list[Effect] = field(default_factory=list)
    handed_over: list[str] = field(default_factory=list)
    waits: bool = True

    def queued(self, job: Job, now_ms: int) -> None:
        self.effects.append(Dispatch(job.request_id, "w1", 3, 1))

    def worker_seen(self, pool: str, event: WorkerEvent, now_ms: int) -> None: ...

    def orphaned(self, request_id: str, last_attempt: int, now_ms: int) -> None:
        self.handed_over.append(request_id)

    def is_waiting(self, request_id: str) -> bool:
        return self.waits

    def decide(self, now_ms: int) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects


@dataclass
class Publisher:
    fails: bool = False
    sent: list[dict[str, Any]] = field(default_factory=list)

    async def send(self, topic: str, value: bytes, **fields: Any) -> None:
        if self.fails:
            raise PublishError("down")
        self.sent.append({"topic": topic, "value": value, **fields})


class Streams:
    async def append(self, writes: Sequence[Any]) -> list[Appended]:
        return [Appended.OK for _ in writes]


class Bench:
    def __init__(self) -> None:
        self.policy = ScriptedPolicy()
        self.publisher = Publisher()
        self.topics = Topics()
        self.scheduler = Scheduler(
            topics=self.topics,
            policy=cast(Any, self.policy),
            streams=cast(Any, Streams()),
            publisher=cast(Any, self.publisher),
            presence=cast(Any, None),
            scheduler_id="me",
        )

    async def dispatched(self) -> str:
        """A request that was given to ``w1`` as attempt 1."""
        record = queued_record()
        raw = SimpleNamespace(value=record.encode(), headers=())
        await self.scheduler.admit([(cast(Any, raw), cast(Any, SimpleNamespace()))], old=False)
        async with asyncio.timeout(5):
            while not self.publisher.sent:
                await asyncio.sleep(0)
        return record.request_id

    async def preempt(self, *wishes: Preempt) -> list[dict[str, Any]]:
        """What is published because of these wishes."""
        before = len(self.publisher.sent)
        self.policy.effects = list(wishes)
        self.scheduler.react()
        await self.scheduler.finish(5)
        return self.publisher.sent[before:]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    delivering = asyncio.ensure_future(made.scheduler.deliver())
    yield made
    await end_tasks([delivering])


async def test_a_wish_goes_after_its_dispatch_and_names_the_attempt_L1(bench: Bench) -> None:
    request_id = await bench.dispatched()
    dispatch = bench.publisher.sent[0]
    assert decode(DispatchRecord, dispatch["value"]).scheduler_id == "me"
    (sent,) = await bench.preempt(Preempt(request_id, "w1", 3))
    assert (sent["topic"], sent["partition"], sent["key"]) == (dispatch["topic"], 3, request_id)
    assert is_preempt(sent["headers"])
    wish = read_preempt(sent["value"])
    assert wish is not None
    assert (wish.preempted_id, wish.worker_id, wish.attempt) == (request_id, "w1", 1)


async def test_wishes_for_what_runs_elsewhere_or_is_unknown_are_dropped_L1(bench: Bench) -> None:
    request_id = await bench.dispatched()
    assert await bench.preempt(Preempt(request_id, "w2", 4), Preempt(OTHER, "w1", 3)) == []


async def test_a_wish_that_kafka_does_not_take_is_dropped_L1(bench: Bench) -> None:
    request_id = await bench.dispatched()
    bench.publisher.fails = True
    assert await bench.preempt(Preempt(request_id, "w1", 3)) == []
    bench.publisher.fails = False
    assert len(await bench.preempt(Preempt(request_id, "w1", 3))) == 1


async def test_only_the_worker_that_has_a_request_hands_it_over(bench: Bench) -> None:
    request_id = await bench.dispatched()

    def hear(worker_id: str) -> None:
        bench.scheduler.heard(
            "default",
            WorkerEvent(
                worker_id=worker_id,
                slot=0,
                sent_ms=0,
                max_seqs=1,
                running=0,
                handed_over=[request_id, OTHER],
            ),
        )

    hear("w0")  # told again, of an earlier attempt
    assert bench.policy.handed_over == []
    hear("w1")
    assert bench.policy.handed_over == [request_id]


async def test_the_backlog_is_of_those_that_wait_for_a_pool(bench: Bench) -> None:
    await bench.dispatched()
    assert bench.scheduler.backlog("default") == 1
    assert bench.scheduler.backlog("another") == 0
    bench.policy.waits = False
    assert bench.scheduler.backlog("default") == 0
