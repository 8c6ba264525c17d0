"""The reaper on a real broker and Redis: no accepted request stays open for ever (I5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from contracts.entries import Moderated, Terminal, Text
from contracts.records import OutcomeRecord, decode
from contracts.stream_ids import MODERATED, StreamId
from contracts.tiers import Status
from infra.open_requests_redis import OPEN_KEY, OpenRequests
from infra.stream_redis import stream_key
from stages.reaper import DEADLINE_MARGIN_MS, ORPHANED
from stages.scheduler_kafka import SchedulerRole
from tests.attempts import start_attempt
from tests.integration.test_stage_scheduler import CardboardWorker, alive, queue

from .stage_bench import Bench, now_ms, queued_record, request_record, running, stage_settings, until

ORPHAN_SECONDS = 1.0


@pytest.fixture
async def bench(kafka: str, redis_server: str) -> AsyncIterator[Bench]:
    settings = stage_settings(
        kafka,
        redis_server,
        907,
        streams={"lease_ms": 400},
        scheduler={"worker_timeout_ms": 600, "orphan_seconds": ORPHAN_SECONDS},
    )
    async with Bench(settings) as made:
        yield made


async def accepted(bench: Bench, *, deadline_in_ms: int = 600_000) -> str:
    """A request whose record never reached Kafka."""
    record = request_record(deadline_ms=now_ms() + deadline_in_ms)
    await bench.accepted(record)
    return record.request_id


async def outcome(bench: Bench, request_id: str) -> OutcomeRecord:
    found = await until(lambda: bench.outcomes.of(request_id), f"outcome of {request_id}")
    return decode(OutcomeRecord, found[0].value)


async def in_index(bench: Bench, request_id: str) -> bool:
    return await bench.redis.zscore(OPEN_KEY, request_id) is not None


async def test_i5_a_request_whose_record_never_reached_kafka_expires_with_an_outcome(
    bench: Bench,
) -> None:
    rid = await accepted(bench, deadline_in_ms=-DEADLINE_MARGIN_MS + 1_500)
    async with running(SchedulerRole(bench.settings)):
        made = await outcome(bench, rid)
    assert (made.status, made.tenant, made.key_id, made.attempts) == (Status.EXPIRED, "t1", "k1", 0)
    assert made.error is not None
    assert made.error.code == "deadline_exceeded"
    assert (await bench.reply(rid)).terminal is not None
    assert not await in_index(bench, rid)


async def test_i5_requests_older_than_their_topics_fail_as_retryable_and_younger_ones_wait(
    bench: Bench,
) -> None:
    lost = await accepted(bench)
    await bench.streams.append([(lost, MODERATED, Moderated(prompt_tokens=3))])
    await asyncio.sleep(0.005)
    await OpenRequests(bench.redis, bench.topics.prefix).topics_born(now_ms())
    await asyncio.sleep(0.005)
    waiting = await accepted(bench)
    async with running(SchedulerRole(bench.settings)):
        made = await outcome(bench, lost)
        assert made.error is not None
        assert made.error.code == "request_lost"
        score = await bench.redis.zscore(OPEN_KEY, waiting)

        async def looked_at() -> bool:
            return await bench.redis.zscore(OPEN_KEY, waiting) > score

        await until(looked_at, "the younger one is looked at")
    assert (await bench.reply(waiting)).terminal is None


async def test_i5_a_started_request_nobody_has_in_hand_fails_and_one_with_a_lease_goes_on(
    bench: Bench,
) -> None:
    orphan, leased = await accepted(bench), await accepted(bench)
    for rid in (orphan, leased):
        await start_attempt(bench.streams, rid, 1, "dead")
        await bench.streams.append([(rid, StreamId(1, 2), Text("ab", (1, 2)))])
    async with running(SchedulerRole(bench.settings)):

        async def orphan_sealed() -> bool:
            await bench.streams.renew_leases([leased], "w")
            return (await bench.reply(orphan)).terminal is not None

        await until(orphan_sealed, "the orphan is ended")
        made = await outcome(bench, orphan)
        assert made.error is not None
        assert made.error.code == "worker_lost"
        assert (made.attempts, made.usage.completion_tokens) == (1, 2)
        assert made.choices[0].text == "ab"
        assert (await bench.reply(leased)).terminal is None


async def test_requests_in_hand_are_never_reaped_however_long_they_take(bench: Bench) -> None:
    role = SchedulerRole(bench.settings)
    worker = CardboardWorker(bench, "w", 0, seqs=1)
    async with running(role):
        # Past its deadline's margin by the reaper's own rule; the scheduler waits for a second worker.
        waiting = await queue(bench, queued_record())
        canary = await accepted(bench, deadline_in_ms=-DEADLINE_MARGIN_MS + 2_500)
        assert (await outcome(bench, canary)).status is Status.EXPIRED
        assert (await bench.reply(waiting)).terminal is None
        assert await in_index(bench, waiting)
        async with alive(worker):
            await worker.start(await worker.got(waiting))
            await worker.finish(waiting)
    assert not await in_index(bench, waiting)


async def test_streams_that_are_gone_or_sealed_leave_the_index(bench: Bench) -> None:
    gone, sealed = await accepted(bench), await accepted(bench)
    await bench.redis.delete(stream_key(gone))
    await bench.streams.seal(sealed, Terminal(status=Status.CANCELLED))
    await bench.redis.zadd(OPEN_KEY, {sealed: 1})  # as if the removal had failed
    async with running(SchedulerRole(bench.settings)):

        async def empty() -> bool:
            return await bench.redis.zcard(OPEN_KEY) == 0

        await until(empty, "the index is true again")
    assert not bench.outcomes.of(sealed), "its sealer's to publish"


async def test_i5_a_reaper_that_died_between_seal_and_outcome_is_followed_up(bench: Bench) -> None:
    rid = await accepted(bench)
    foreign = await accepted(bench)
    index = OpenRequests(bench.redis, bench.topics.prefix)
    for request_id in (rid, foreign):
        await index.ending(request_id)
    await bench.streams.seal(rid, ORPHANED)
    await bench.streams.seal(foreign, Terminal(status=Status.COMPLETED))
    async with running(SchedulerRole(bench.settings)):
        assert (await outcome(bench, rid)).status is Status.FAILED

        async def settled() -> bool:
            return not await index.half_ended(10)

        await until(settled, "nothing is half ended")
    assert not bench.outcomes.of(foreign)


async def test_two_reapers_end_a_request_once(bench: Bench) -> None:
    rids = [await accepted(bench, deadline_in_ms=-DEADLINE_MARGIN_MS) for _ in range(20)]
    first, second = SchedulerRole(bench.settings), SchedulerRole(bench.settings)
    async with running(first), running(second):
        for rid in rids:
            assert (await outcome(bench, rid)).status is Status.EXPIRED
    for rid in rids:
        entries = await bench.streams.read_all(rid)
        assert [e for e in entries if isinstance(e.entry, Terminal)] == [entries[-1]]
