"""A reply that is told to make room goes on later, as if nothing had happened (L1)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.preempt import PREEMPT_HEADERS, PreemptRecord
from contracts.tiers import QueueClass, Status
from infra.settings import Settings
from stages.scheduler_kafka import SchedulerRole
from tests.chaos.expected import full_text
from tests.integration.stage_bench import running
from tests.integration.worker_bench import (
    WorkerBench,
    WorkerProcess,
    eventually,
    queue,
    worker_bench,
)

pytestmark = pytest.mark.timeout(90)

BATCH_TOKENS = 400
CHAT_TOKENS = 20


@pytest.fixture
async def bench(settings: Callable[..., Settings], tmp_path: Path) -> AsyncIterator[WorkerBench]:
    configured = settings(
        streams={"lease_ms": 60_000},  # long enough that no lease runs out by itself
        scheduler={"reserved_slots": {}, "preempt_after_ms": 100},
        worker={
            "engine": "sim",
            "max_seqs": 2,
            "heartbeat_ms": 100,
            "sim": {"ttft_ms": 5, "tpot_ms": 10, "slowdown_per_request": 0},
        },
    )
    async with worker_bench(configured, tmp_path) as found:
        yield found


async def test_a_chat_gets_the_slot_of_a_batch_reply_which_goes_on_later_each_token_once_L1(
    bench: WorkerBench,
) -> None:
    await bench.start_worker()
    async with running(SchedulerRole(bench.settings)):
        batch = [await queue(bench, QueueClass.BATCH, f"line {i}", BATCH_TOKENS) for i in range(2)]
        for line in batch:
            await bench.tokens_out(line.request_id, 10)
        chat = await queue(bench, QueueClass.INTERACTIVE, "hello", CHAT_TOKENS)
        for record in (chat, *batch):
            await bench.sealed(record.request_id)
        outcomes = await bench.outcomes(*(r.request_id for r in (chat, *batch)))
    # The chat began and ended while both lines had most of their tokens to go.
    ends = {rid: outcome.finished_ms for rid, outcome in outcomes.items()}
    assert ends.pop(chat.request_id) < min(ends.values())
    assert sorted(outcomes[line.request_id].attempts for line in batch) == [1, 2]
    for record, tokens in ((chat, CHAT_TOKENS), *((line, BATCH_TOKENS) for line in batch)):
        outcome = outcomes[record.request_id]
        assert outcome.status is Status.COMPLETED
        assert outcome.usage.completion_tokens == tokens
        reply = await bench.reply(record.request_id)
        assert reply.gap is None
        assert reply.tokens_out == tokens
        assert reply.choices[0].text == full_text(record.prompt_token_ids, None, 0, tokens)


async def preempt(
    bench: WorkerBench, worker: WorkerProcess, rid: str, attempt: int, **wish: Any
) -> None:
    value = PreemptRecord(
        preempted_id=rid, attempt=attempt, worker_id=wish.get("worker_id", worker.worker_id)
    ).encode()
    await bench.raw(worker, wish.get("value", value), rid, list(PREEMPT_HEADERS))


async def handed_over(bench: WorkerBench) -> list[str]:
    return [rid for event in await bench.events() for rid in event.handed_over]


async def test_wishes_that_are_unknown_late_or_repeated_are_harmless_L1(bench: WorkerBench) -> None:
    worker = await bench.start_worker()
    record = bench.record(rid := await bench.accept(), "make room", max_tokens=300)
    await preempt(bench, worker, rid, 1)  # before it has come
    await bench.dispatch(worker, record)
    await bench.tokens_out(rid, 3)
    await preempt(bench, worker, rid, 1, worker_id="an earlier one of this slot")
    await preempt(bench, worker, rid, 0)
    await preempt(bench, worker, rid, 1, value=b"?")
    await bench.generate(worker, "what comes after them", max_tokens=1)
    assert await handed_over(bench) == []
    for _ in range(3):
        await preempt(bench, worker, rid, 1)
    await eventually(lambda: handed_over(bench), "it is handed over")
    stopped = await bench.reply(rid)
    assert stopped.terminal is None
    assert 3 <= stopped.tokens_out < 300
    assert await bench.streams.lease_holders([rid]) == [None]
    await bench.dispatch(worker, record.model_copy(update={"attempt": 2}))
    await preempt(bench, worker, rid, 1)  # of the attempt that is over
    reply = await bench.sealed(rid)
    assert reply.choices[0].text == full_text(record.prompt_token_ids, None, 0, 300)
    assert (reply.attempts, reply.tokens_out) == (2, 300)
    await preempt(bench, worker, rid, 2)
    await bench.generate(worker, "after its end", max_tokens=1)
    assert await handed_over(bench) == [rid]


async def test_the_position_of_a_preempted_dispatch_counts_as_reached_L1(bench: WorkerBench) -> None:
    first = await bench.start_worker()
    record = bench.record(rid := await bench.accept(), "make room", max_tokens=300)
    await bench.dispatch(first, record)
    await bench.tokens_out(rid, 3)
    await preempt(bench, first, rid, 1)
    await eventually(lambda: handed_over(bench), "it is handed over")
    first.process.terminate()
    await eventually(_ended(first), "the worker has drained")
    second = await bench.start_worker()
    assert second.slot == first.slot
    await bench.generate(second, "next", max_tokens=1)
    assert rid not in second.log.read_text()
    assert (await bench.reply(rid)).attempts == 1


async def test_a_reply_that_could_not_be_continued_is_not_stopped_L1(bench: WorkerBench) -> None:
    worker = await bench.start_worker()
    record = bench.record(rid := await bench.accept(choices=2), "both", max_tokens=150, n=2)
    await bench.dispatch(worker, record)
    await bench.tokens_out(rid, 4)
    await preempt(bench, worker, rid, 1)
    reply = await bench.sealed(rid)
    assert (reply.attempts, reply.tokens_out) == (1, 300)
    assert await handed_over(bench) == []


def _ended(worker: WorkerProcess) -> Callable[[], Any]:
    async def ended() -> bool:
        return worker.process.poll() is not None

    return ended
