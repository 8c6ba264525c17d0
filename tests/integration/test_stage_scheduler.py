"""The scheduler on a real broker and Redis, with workers of cardboard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import REGISTRY

from contracts.entries import Terminal, Text
from contracts.records import DeadLetterRecord, DispatchRecord, OutcomeRecord, QueuedRecord, decode
from contracts.stream_ids import SEAL, StreamId
from contracts.tiers import QueueClass, Status
from contracts.token_stream import Appended
from contracts.worker_events import WorkerEvent
from infra.presence_redis import ReaderPresence
from infra.tasks import end_tasks
from infra.worker_feed_redis import WorkerFeed
from stages.scheduler_kafka import DEPTH_KEY, SchedulerRole
from tests.attempts import start_attempt

from .stage_bench import Bench, now_ms, queued_record, running, stage_settings, until

LEASE_MS = 400


@pytest.fixture
async def bench(kafka: str, redis_server: str) -> AsyncIterator[Bench]:
    settings = stage_settings(
        kafka,
        redis_server,
        903,
        streams={"lease_ms": LEASE_MS},
        scheduler={"worker_timeout_ms": 600, "max_attempts": 3, "window_per_class": 8},
    )
    async with Bench(settings) as made:
        yield made


class CardboardWorker:
    """Heartbeats, and does with its dispatches what the test tells it to."""

    def __init__(self, bench: Bench, name: str, slot: int, seqs: int = 4) -> None:
        self.bench = bench
        self.name = name
        self.slot = slot
        self.seqs = seqs
        self.feed = WorkerFeed(bench.redis, "default")
        self.held: dict[str, DispatchRecord] = {}
        self.caches: dict[str, Any] = {}

    def given(self) -> list[DispatchRecord]:
        """What it was ever given, in order."""
        records = (
            decode(DispatchRecord, r.value)
            for r in self.bench.dispatch.records
            if r.partition == self.slot
        )
        return [r for r in records if r.worker_id == self.name]

    async def got(self, request_id: str, attempt: int = 1) -> DispatchRecord:
        def find() -> list[DispatchRecord]:
            return [r for r in self.given() if (r.request_id, r.attempt) == (request_id, attempt)]

        return (await until(find, f"{request_id} attempt {attempt} at {self.name}"))[0]

    async def beat(self, finished: tuple[str, ...] = ()) -> None:
        await self.feed.publish(
            WorkerEvent(
                worker_id=self.name,
                slot=self.slot,
                sent_ms=0,
                max_seqs=self.seqs,
                running=len(self.held),
                finished=list(finished),
                **self.caches,
            )
        )

    async def start(self, record: DispatchRecord) -> Appended:
        """Begin an attempt, and from now on renew its lease."""
        streams, attempt = self.bench.streams, record.attempt
        result = await start_attempt(streams, record.request_id, attempt, self.name)
        if result is Appended.OK:
            self.held[record.request_id] = record
        return result

    async def finish(self, request_id: str) -> None:
        self.held.pop(request_id, None)
        await self.bench.streams.seal(request_id, Terminal(status=Status.COMPLETED))
        await self.beat((request_id,))

    async def live(self) -> None:
        while True:
            await self.beat()
            if self.held:
                await self.bench.streams.renew_leases(list(self.held), self.name)
            await asyncio.sleep(0.1)


@asynccontextmanager
async def alive(*workers: CardboardWorker) -> AsyncIterator[None]:
    """The workers' heartbeats and lease renewals while the block runs."""
    tasks = [asyncio.ensure_future(w.live()) for w in workers]
    try:
        yield
    finally:
        await end_tasks(tasks)


async def queue(bench: Bench, record: QueuedRecord, *, accept: bool = True) -> str:
    if accept:
        await bench.accepted(record)
    await bench.publisher.send(
        bench.topics.queue(record.queue_class), record.encode(), key=record.request_id
    )
    return record.request_id


async def outcome(bench: Bench, request_id: str) -> OutcomeRecord:
    found = await until(lambda: bench.outcomes.of(request_id), f"outcome of {request_id}")
    return decode(OutcomeRecord, found[0].value)


def role_of(bench: Bench) -> SchedulerRole:
    return SchedulerRole(bench.settings)


def positions(role: SchedulerRole) -> tuple[int, int]:
    """Records taken and not done, and requests held."""
    assert role._intake is not None
    marks = role._intake.tracked.marks.values()
    return sum(m.in_flight for m in marks), len(role._intake.scheduler._held)


async def test_dispatches_in_order_within_capacity_to_the_partition_of_the_worker(bench: Bench) -> None:
    records = [queued_record(queue_class=c) for c in reversed(QueueClass) for _ in range(3)]
    expected = [r.request_id for c in QueueClass for r in records if r.queue_class is c]
    # Same millisecond or not: within a class the queue's own stamp decides.
    records = [r.model_copy(update={"moderated_ms": r.moderated_ms + i}) for i, r in enumerate(records)]
    for record in records:
        await queue(bench, record)
    worker = CardboardWorker(bench, "w", 2, seqs=2)
    strict = bench.settings.scheduler.model_copy(update={"policy": "strict"})
    role = SchedulerRole(bench.settings.model_copy(update={"scheduler": strict}))
    async with running(role):
        await until(lambda: positions(role)[1] == len(records), "all in the window")
        async with alive(worker):
            served: list[str] = []
            while len(served) < len(records):
                done = len(served)
                await until(lambda n=done: len(worker.given()) > n, "next dispatch")
                assert len(worker.given()) - done <= 2, "over capacity"
                record = worker.given()[done]
                assert await worker.start(record) is Appended.OK
                served.append(record.request_id)
                await worker.finish(record.request_id)
            assert served == expected
            await until(lambda: positions(role) == (0, 0), "everything done")
        assert {r.partition for r in bench.dispatch.records} == {2}


async def test_prompt_tokens_are_counted_by_where_they_are_expected_to_come_from(bench: Bench) -> None:
    def counted() -> list[float]:
        name = "headrace_dispatched_prompt_tokens_total"
        values = (REGISTRY.get_sample_value(name, {"source": s}) for s in ("worker", "tier", "computed"))
        return [value or 0.0 for value in values]

    worker = CardboardWorker(bench, "w", 0)
    worker.caches = {
        "prefixes": ["a"],
        "tier_prefixes": ["a", "b"],
        "load_us_per_token": 20.0,
        "prefill_us_per_token": 100.0,
    }
    before = counted()
    async with running(role_of(bench)), alive(worker):
        record = queued_record(prompt_token_ids=[1] * 800, prefix_hashes=["a", "b", "c"])
        await worker.got(await queue(bench, record))
        await until(lambda: sum(counted()) == sum(before) + 800, "the prompt counted")
    assert [after - was for after, was in zip(counted(), before, strict=True)] == [256, 256, 288]


async def test_a_finished_request_makes_room_at_once_without_a_second_dispatch(bench: Bench) -> None:
    worker = CardboardWorker(bench, "w", 0, seqs=1)
    async with running(role_of(bench)), alive(worker):
        for _ in range(10):
            request_id = await queue(bench, queued_record())
            await worker.start(await worker.got(request_id))
            await worker.finish(request_id)
        assert len(worker.given()) == 10


async def test_i2_a_lapsed_lease_dispatches_again_to_a_living_worker(bench: Bench) -> None:
    doomed = CardboardWorker(bench, "doomed", 0, seqs=8)
    other = CardboardWorker(bench, "other", 1, seqs=4)
    role = role_of(bench)
    async with running(role), alive(other):
        async with alive(doomed):
            request_id = await queue(bench, queued_record())
            await doomed.start(await doomed.got(request_id))
            await bench.streams.append([(request_id, StreamId(1, 1), Text("a", (1,)))])
        again = await other.got(request_id, attempt=2)
        assert await other.start(again) is Appended.OK
        late = [(request_id, StreamId(1, 2), Text("b", (2,)))]
        assert await bench.streams.append(late) == [Appended.FENCED]
        await other.finish(request_id)
        await until(lambda: positions(role) == (0, 0), "done")


async def test_i2_a_worker_that_dies_before_it_starts_loses_the_request_too(bench: Bench) -> None:
    doomed = CardboardWorker(bench, "doomed", 0, seqs=8)
    other = CardboardWorker(bench, "other", 1, seqs=4)
    async with running(role_of(bench)), alive(other):
        async with alive(doomed):
            request_id = await queue(bench, queued_record())
            await doomed.got(request_id)
        assert (await other.got(request_id, attempt=2)).worker_id == "other"


async def test_a_request_that_loses_every_worker_fails_as_worker_lost(bench: Bench) -> None:
    worker = CardboardWorker(bench, "w", 0)
    async with running(role_of(bench)), alive(worker):
        request_id = await queue(bench, queued_record())
        for attempt in (1, 2, 3):
            await worker.start(await worker.got(request_id, attempt))
            worker.held.clear()
        made = await outcome(bench, request_id)
        assert made.status is Status.FAILED
        assert made.error is not None
        assert made.error.code == "worker_lost"
        assert made.attempts == 3
        assert (await bench.reply(request_id)).last_id == SEAL


async def test_a_request_sealed_without_word_from_its_worker_is_done_and_has_an_outcome(
    bench: Bench,
) -> None:
    worker = CardboardWorker(bench, "w", 0)
    role = role_of(bench)
    async with running(role), alive(worker):
        request_id = await queue(bench, queued_record())
        await worker.start(await worker.got(request_id))
        await bench.streams.seal(request_id, Terminal(status=Status.CANCELLED))
        assert (await outcome(bench, request_id)).status is Status.CANCELLED
        await until(lambda: positions(role) == (0, 0), "done")


async def test_d5_cancelled_and_expired_requests_are_dropped_and_the_live_one_served_next(
    bench: Bench,
) -> None:
    worker = CardboardWorker(bench, "w", 0, seqs=1)
    role = role_of(bench)
    async with running(role):
        cancelled = [await queue(bench, queued_record()) for _ in range(3)]
        for request_id in cancelled:
            await bench.streams.seal(request_id, Terminal(status=Status.CANCELLED))
        expired = [await queue(bench, queued_record(deadline_ms=now_ms() + 300)) for _ in range(3)]
        live = await queue(bench, queued_record())
        for request_id in expired:
            assert (await outcome(bench, request_id)).status is Status.EXPIRED
        async with alive(worker):
            await worker.start(await worker.got(live))
            await worker.finish(live)
            for request_id in cancelled:
                assert (await outcome(bench, request_id)).status is Status.CANCELLED
            await until(lambda: positions(role) == (0, 0), "done")
        # A cancelled one may have been on its way to the worker, which cannot start it.
        passed = [r for r in worker.given() if r.request_id != live]
        assert {r.request_id for r in passed} <= set(cancelled)
        assert {await worker.start(r) for r in passed} <= {Appended.SEALED}


async def test_g2_g4_g13_a_restarted_scheduler_neither_loses_nor_doubles(bench: Bench) -> None:
    worker = CardboardWorker(bench, "w", 0, seqs=3)
    async with alive(worker):
        async with running(role_of(bench), drain=False):
            first = [await queue(bench, queued_record()) for _ in range(6)]
            await until(lambda: len(worker.given()) == 3, "three dispatched")
            running_now = worker.given()
            for record in running_now:
                await worker.start(record)
            # The first runs on, the second ends without the dead scheduler hearing of it.
            await bench.streams.seal(running_now[1].request_id, Terminal(status=Status.COMPLETED))
            worker.held.pop(running_now[1].request_id)
        role = role_of(bench)
        async with running(role):
            assert (await outcome(bench, running_now[1].request_id)).status is Status.COMPLETED
            await until(lambda: len(worker.given()) == 4, "the next one in the freed slot")
            for record in [*running_now[::2], worker.given()[3]]:
                if record.request_id not in worker.held:
                    assert await worker.start(record) is Appended.OK
                await worker.finish(record.request_id)
            await until(lambda: len(worker.given()) == 6, "the rest")
            for record in worker.given()[4:]:
                assert await worker.start(record) is Appended.OK
                await worker.finish(record.request_id)
            await until(lambda: positions(role) == (0, 0), "done")
        assert sorted(r.request_id for r in worker.given()) == sorted(first)
        assert {r.attempt for r in worker.given()} == {1}


async def test_g2_a_restarted_scheduler_continues_what_lost_its_worker_meanwhile(bench: Bench) -> None:
    doomed = CardboardWorker(bench, "doomed", 0)
    async with running(role_of(bench), drain=False), alive(doomed):
        request_id = await queue(bench, queued_record())
        await doomed.start(await doomed.got(request_id))
    other = CardboardWorker(bench, "other", 1)
    async with running(role_of(bench)), alive(other):
        assert await other.start(await other.got(request_id, attempt=2)) is Appended.OK
        await other.finish(request_id)


async def test_g2_a_request_queued_twice_is_run_once(bench: Bench) -> None:
    worker = CardboardWorker(bench, "w", 0)
    role = role_of(bench)
    async with running(role), alive(worker):
        record = queued_record()
        await queue(bench, record)
        await queue(bench, record, accept=False)
        await worker.start(await worker.got(record.request_id))
        await queue(bench, record, accept=False)
        await worker.finish(record.request_id)
        await until(lambda: positions(role) == (0, 0), "done")
        # A copy that comes after the end may reach the worker, which finds the seal; no attempt 2 is made.
        assert {record.attempt for record in worker.given()} == {1}
        assert (await bench.reply(record.request_id)).attempts == 1


async def test_g2_a_request_queued_again_after_its_seal_is_closed_with_an_outcome(bench: Bench) -> None:
    worker = CardboardWorker(bench, "w", 0)
    role = role_of(bench)
    async with running(role), alive(worker):
        record = queued_record()
        await bench.accepted(record)
        await bench.streams.seal(record.request_id, Terminal(status=Status.CANCELLED))
        await queue(bench, record, accept=False)
        assert (await outcome(bench, record.request_id)).status is Status.CANCELLED
        await until(lambda: positions(role) == (0, 0), "done")


async def test_g5_a_poison_record_is_dead_lettered_and_the_next_one_served(bench: Bench) -> None:
    worker = CardboardWorker(bench, "w", 0)
    topic = bench.topics.queue(QueueClass.INTERACTIVE)
    role = role_of(bench)
    async with running(role), alive(worker):
        for value in (
            b"not json",
            b"{",
            b"\xff",
            b"[]",
            b"null",
            b'"str"',
            b"[" * 900 + b"]" * 900,
            b"",
        ):
            for partition in range(2):
                await bench.publisher.send(topic, value, partition=partition)
        known = queued_record()
        await bench.accepted(known)
        newer = known.encode().replace(b'"schema_version":1', b'"schema_version":2')
        await bench.publisher.send(topic, newer, key=known.request_id)
        reply = await bench.sealed(known.request_id)
        assert reply.terminal is not None
        assert reply.terminal.error is not None
        assert reply.terminal.error.code == "bad_record"
        assert (await outcome(bench, known.request_id)).status is Status.FAILED
        await worker.got(await queue(bench, queued_record()))
        await until(lambda: len(bench.deadletter.records) == 17, "all dead letters")
        letters = [DeadLetterRecord.model_validate_json(r.value) for r in bench.deadletter.records]
        assert {x.stage for x in letters} == {"scheduler"}
        assert [x.request_id for x in letters if x.reason == "newer_schema"] == [known.request_id]
        await until(lambda: positions(role) == (1, 1), "only the served one is open")


async def test_the_window_is_bounded_and_the_depth_counts_what_waits_in_kafka(bench: Bench) -> None:
    role = role_of(bench)
    async with running(role):
        for _ in range(30):
            await queue(bench, queued_record(queue_class=QueueClass.BATCH))

        async def depth() -> dict[bytes, bytes]:
            found: Any = await bench.redis.hgetall(DEPTH_KEY)
            return dict(found)

        async def counted() -> bool:
            return (await depth()).get(b"batch") == b"30"

        await until(counted, "30 waiting")
        assert positions(role)[1] <= 2 * bench.settings.scheduler.window_per_class
        assert await bench.redis.pttl(DEPTH_KEY) > 0
        # A full class does not hold up the others.
        worker = CardboardWorker(bench, "w", 0, seqs=4)
        interactive = await queue(bench, queued_record())
        waiting = role._policy.waiting
        await until(lambda: waiting()[QueueClass.INTERACTIVE], "the interactive request in its line")
        async with alive(worker):
            await worker.got(interactive)
            # In the first handful, though dispatches of one handful may overtake each other.
            assert interactive in [r.request_id for r in worker.given()[: worker.seqs]]

            async def whole_line_served() -> bool:
                for record in worker.given():
                    if (await bench.reply(record.request_id)).terminal is None:
                        await worker.start(record)
                        await worker.finish(record.request_id)
                return len(worker.given()) == 31

            await until(whole_line_served, "the whole line served")


async def test_d1_d5_a_waiting_request_that_all_readers_left_never_reaches_a_worker(
    bench: Bench,
) -> None:
    presence = ReaderPresence(bench.redis)
    role = role_of(bench)
    async with running(role):
        left = await queue(bench, queued_record(leave_grace_ms=0))
        read = await queue(bench, queued_record(leave_grace_ms=0))
        unread = await queue(bench, queued_record(leave_grace_ms=500))
        batch = await queue(bench, queued_record(leave_grace_ms=None))
        await presence.vouch("hub", [left, read], [])
        await presence.vouch("hub", [], [left])
        for request_id in (left, unread):
            made = await outcome(bench, request_id)
            assert (made.status, made.attempts) == (Status.CANCELLED, 0)
            await presence.vouch("hub", [read], [])
        worker = CardboardWorker(bench, "w", 0, seqs=4)
        async with alive(worker):
            for request_id in (read, batch):
                await worker.start(await worker.got(request_id))
                await worker.finish(request_id)
            await until(lambda: positions(role) == (0, 0), "everything done")
        assert {r.request_id for r in worker.given()} == {read, batch}
        assert not role._policy.in_flight()
        assert not any(role._policy.waiting().values())
