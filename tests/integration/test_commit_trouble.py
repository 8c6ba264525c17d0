"""A group's coordinator that is away, and partitions that move while records are in hand (G1 G10 G14)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import GroupCoordinatorNotAvailableError

from contracts.tiers import QueueClass
from contracts.token_stream import Appended
from infra.commit_alarm import POSITIONS_NOT_COMMITTED, CommitAlarm
from infra.kafka import Place, Publisher, Tracked, make_consumer
from infra.settings import Settings
from infra.topics import ensure_topics
from stages.moderation_faust import ModerationRole
from stages.scheduler_kafka import SchedulerRole

from .stage_bench import Bench, queued_record, request_record, running, stage_settings, until
from .test_stage_scheduler import CardboardWorker, alive, positions, queue

pytestmark = pytest.mark.timeout(60)

ALARM_SECONDS = 1.0


@pytest.fixture
async def bench(kafka: str, redis_server: str) -> AsyncIterator[Bench]:
    settings = stage_settings(
        kafka,
        redis_server,
        908,
        scheduler={"window_per_class": 4},
    )
    kafka_settings = settings.kafka.model_copy(update={"stall_seconds": ALARM_SECONDS})
    async with Bench(settings.model_copy(update={"kafka": kafka_settings})) as made:
        yield made


class Refusals:
    """Commits of a consumer fail as if its coordinator were away."""

    def __init__(self, role: SchedulerRole) -> None:
        consumer: Any = role._consumer
        self.count = 0
        consumer.commit = self._refuse

    async def _refuse(self, offsets: dict[TopicPartition, int]) -> None:
        self.count += 1
        raise GroupCoordinatorNotAvailableError


async def test_a_scheduler_that_cannot_commit_takes_no_more_and_its_successor_repeats_nothing_G10(
    bench: Bench,
) -> None:
    worker = CardboardWorker(bench, "w", 0)
    role = SchedulerRole(bench.settings)
    async with alive(worker):
        async with running(role, drain=False) as work:
            refusals = Refusals(role)
            served = await queue(bench, queued_record())
            runs = await queue(bench, queued_record())
            for request_id in (served, runs):
                assert await worker.start(await worker.got(request_id)) is Appended.OK
            await worker.finish(served)

            async def not_ready() -> bool:
                return await role.not_ready() == POSITIONS_NOT_COMMITTED

            await until(not_ready, "the alarm")
            seen = refusals.count
            # Tries are a second apart, and a read that was under way takes a quarter of one.
            await until(lambda: refusals.count > seen + 1, "a read that was under way is over")
            late = await queue(bench, queued_record())
            seen = refusals.count
            await until(lambda: refusals.count > seen, "more tries to commit")
            assert not [r for r in worker.given() if r.request_id == late]
            assert not work.done(), "a stopped intake is no stall"
        role = SchedulerRole(bench.settings)
        async with running(role):
            assert await worker.start(await worker.got(late)) is Appended.OK
            for request_id in (runs, late):
                await worker.finish(request_id)
            await until(lambda: positions(role) == (0, 0), "all done")
    assert [r.request_id for r in worker.given()] == [served, runs, late]


async def test_a_scheduler_with_full_windows_stays_in_its_group_however_long_it_does_not_poll_G1(
    bench: Bench,
) -> None:
    worker = CardboardWorker(bench, "w", 0, seqs=1)
    role = SchedulerRole(bench.settings)
    async with running(role) as work, alive(worker):
        long = await queue(bench, queued_record())
        assert await worker.start(await worker.got(long)) is Appended.OK
        for queue_class in QueueClass:
            for _ in range(2 * bench.settings.scheduler.window_per_class):
                await queue(bench, queued_record(queue_class=queue_class))
        intake: Any = role._intake
        await until(lambda: max(intake._room().values()) <= 0, "every window is full")
        consumer: Any = role._consumer
        coordinator, member = consumer._coordinator, consumer._coordinator.member_id
        before = (member, coordinator.generation, consumer.assignment())
        beats = 0
        beat = coordinator._do_heartbeat

        async def counted() -> bool:
            nonlocal beats
            beats += 1
            return bool(await beat())

        coordinator._do_heartbeat = counted
        consumer._subscription._last_fetch_ended -= 3_600  # as if an hour had passed
        await until(lambda: beats > 3, "heartbeats")
        assert (coordinator.member_id, coordinator.generation, consumer.assignment()) == before
        assert not work.done()
        assert [r.request_id for r in worker.given()] == [long]


async def test_moderation_that_cannot_commit_takes_no_more_until_it_can_G10(bench: Bench) -> None:
    role = ModerationRole(bench.settings)
    async with running(role) as work:
        thread: Any = role._app.consumer._thread  # type: ignore[union-attr]
        commit, answered = thread.commit, asyncio.Event()
        asked = asyncio.Event()

        async def slow(offsets: Any) -> bool:
            asked.set()
            await answered.wait()
            return bool(await commit(offsets))

        thread.commit = slow
        first = await send(bench)
        await until(lambda: bench.queue.of(first), "moderated")
        await asyncio.wait_for(asked.wait(), 10)

        async def not_ready() -> bool:
            return await role.not_ready() == POSITIONS_NOT_COMMITTED

        await until(not_ready, "the alarm")
        second = await send(bench)
        # What went another way in the meantime is there, again and again; the request is not.
        for _ in range(10):
            canary = queued_record()
            await bench.publisher.send(
                bench.topics.queue(canary.queue_class), canary.encode(), key=canary.request_id
            )
            await until(lambda c=canary: bench.queue.of(c.request_id), "the canary")
        assert not bench.queue.of(second)
        assert not work.done()
        answered.set()
        await until(lambda: bench.queue.of(second), "taken again")
        assert len(bench.queue.of(first)) == 1


async def send(bench: Bench) -> str:
    record = request_record()
    await bench.accepted(record)
    await bench.publisher.send(bench.topics.requests, record.encode(), key=record.request_id)
    return record.request_id


RECORDS = 5


async def test_partitions_that_move_between_fetch_and_commit_lose_and_skip_nothing_G14(
    settings: Callable[..., Settings],
) -> None:
    made = settings()
    await ensure_topics(made)
    topic = made.kafka.topics.requests
    publisher = Publisher(made.kafka)
    await publisher.start()
    for partition in range(2):
        for number in range(RECORDS):
            await publisher.send(topic, str(number).encode(), partition=partition)
    await publisher.stop()
    first, second = Member(made, topic), Member(made, topic)
    try:
        await first.start()
        await until(lambda: len(first.taken()) == 2 * RECORDS, "all records at the first")
        in_hand = list(first.places)
        await second.start()
        await until(lambda: len(second.consumer.assignment()) == 1, "a partition has moved")
        await until(lambda: len(first.consumer.assignment()) == 1, "the other one has stayed")
        [moved] = second.consumer.assignment()
        # What was fetched before the partitions moved ends only now, when it is no longer ours to commit.
        for place in in_hand:
            place.done()
        await first.tracked.commit()
        assert (await second.consumer.committed(moved) or 0) == 0
        everything = {(p, n) for p in range(2) for n in range(RECORDS)}
        await until(lambda: first.taken() | second.taken() == everything, "everything again somewhere")
        again = {(moved.partition, n) for n in range(RECORDS)}
        await until(lambda: second.taken() >= again, "all of the moved partition is read again")
        for member in (first, second):
            for place in member.places:
                place.done()

        async def committed() -> bool:
            for member in (first, second):
                await member.tracked.commit()
            partitions = [TopicPartition(topic, partition) for partition in range(2)]
            return [await second.consumer.committed(p) for p in partitions] == [RECORDS, RECORDS]

        await until(committed, "both partitions are committed by whoever has them")
    finally:
        await first.stop()
        await second.stop()


class Member:
    """One consumer of a group that takes records and lets the test end them."""

    def __init__(self, settings: Settings, topic: str) -> None:
        self.consumer: AIOKafkaConsumer = make_consumer(
            settings.kafka, group=f"{topic}-group", client_id="member"
        )
        self.tracked = Tracked(self.consumer, CommitAlarm(60.0))
        self.places: list[Place] = []
        self._topic = topic
        self._task: asyncio.Task[None] | None = None

    def taken(self) -> set[tuple[int, int]]:
        return {(p.partition, p.offset) for p in self.places}

    async def start(self) -> None:
        self.consumer.subscribe([self._topic], listener=self.tracked)
        await self.consumer.start()
        self._task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while True:
            for records in (await self.consumer.getmany(timeout_ms=50)).values():
                self.places += [self.tracked.take(r) for r in records]

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self.consumer.stop()
