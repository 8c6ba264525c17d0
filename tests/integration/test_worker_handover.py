"""A worker that stops before its replies have ended leaves them to others, at once (Q1 Q4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from contracts.worker_events import WorkerEvent
from infra.settings import Settings
from tests.chaos.expected import full_text
from tests.integration.worker_bench import WorkerBench, WorkerProcess, eventually, worker_bench

pytestmark = pytest.mark.timeout(90)

#: Long enough that no lease runs out by itself within this test.
LEASE_MS = 60_000


@pytest.fixture
async def bench(settings: Callable[..., Settings], tmp_path: Path) -> AsyncIterator[WorkerBench]:
    configured = settings(
        streams={"lease_ms": LEASE_MS},
        worker={
            "engine": "sim",
            "max_seqs": 32,
            "heartbeat_ms": 100,
            "drain_seconds": 60,
            "sim": {"ttft_ms": 5, "tpot_ms": 20, "slowdown_per_request": 0},
        },
    )
    async with worker_bench(configured, tmp_path) as found:
        yield found


async def last_words(bench: WorkerBench, worker: WorkerProcess) -> WorkerEvent:
    async def handed_over() -> WorkerEvent | None:
        return next(
            (e for e in await bench.events() if e.worker_id == worker.worker_id and e.handed_over), None
        )

    event: WorkerEvent = await eventually(handed_over, "the worker hands over")
    return event


async def test_q1_what_does_not_finish_in_the_grace_time_goes_on_elsewhere_without_waiting_for_a_lease(
    bench: WorkerBench,
) -> None:
    first, second = await bench.start_worker(), await bench.start_worker()
    record = bench.record(rid := await bench.accept(), "hand over", max_tokens=150)
    await bench.dispatch(first, record)
    await bench.tokens_out(rid, 5)
    first.process.terminate()

    async def told() -> bool:
        mine = [e for e in await bench.events() if e.worker_id == first.worker_id]
        return not mine[-1].accepting

    await eventually(told, "the schedulers are told that it takes no more")
    before = (await bench.reply(rid)).tokens_out
    await bench.tokens_out(rid, before + 20)  # Q4: tokens flow while it drains
    first.process.terminate()  # a second time: the grace time is over
    event = await last_words(bench, first)
    assert event.handed_over == [rid]
    assert not event.accepting
    assert await bench.streams.lease_holders([rid]) == [None]
    assert await asyncio.to_thread(first.process.wait, 15) == 0
    await bench.dispatch(second, record.model_copy(update={"attempt": 2}))
    reply = await bench.sealed(rid)
    assert reply.choices[0].text == full_text(record.prompt_token_ids, None, 0, 150)
    assert reply.attempts == 2
    # Its position counts as reached: the next worker of the slot does not read it again.
    again = await bench.start_worker()
    assert again.slot == first.slot
    await bench.generate(again, "next")
    assert "runs elsewhere" not in again.log.read_text()


async def test_q4_what_was_dispatched_before_the_schedulers_heard_of_the_drain_is_served(
    bench: WorkerBench,
) -> None:
    worker = await bench.start_worker()
    rid = await bench.accept()
    worker.process.terminate()
    await bench.dispatch(worker, bench.record(rid, "just in time", max_tokens=10))
    assert (await bench.sealed(rid)).tokens_out == 10
    assert await asyncio.to_thread(worker.process.wait, 15) == 0
