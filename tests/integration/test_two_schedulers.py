"""Two schedulers of one pool share a worker's slots, and never give more than there are (L4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.records import DispatchRecord, decode
from contracts.tiers import QueueClass, Status
from infra.settings import Settings
from stages.scheduler_kafka import SchedulerRole
from tests.integration.stage_bench import Tap, running, until
from tests.integration.worker_bench import POOL, queue, worker_bench

pytestmark = pytest.mark.timeout(120)

SLOTS = 4
REQUESTS = 80


async def test_two_schedulers_give_a_worker_no_more_than_it_has_and_each_request_once_L4(
    settings: Callable[..., Settings], tmp_path: Path
) -> None:
    configured = settings(
        worker={
            "engine": "sim",
            "max_seqs": SLOTS,
            "heartbeat_ms": 200,  # an event or a dispatch may take four of them
            "sim": {"ttft_ms": 5, "tpot_ms": 5, "slowdown_per_request": 0},
        },
        scheduler={"reserved_slots": {}},
    )
    async with worker_bench(configured, tmp_path) as bench:
        worker = await bench.start_worker()
        roles = [SchedulerRole(configured) for _ in range(2)]
        names = {role.scheduler_id for role in roles}
        tap = Tap(configured, [configured.kafka.topics.dispatch(POOL)])
        await tap.start()
        try:
            async with running(roles[0]), running(roles[1]):

                async def known() -> bool:
                    return (await bench.events())[-1].credits.keys() == names

                await until(known, "the worker knows both")
                records = [
                    await queue(bench, QueueClass.STANDARD, f"request {i}", 1 + i % 7)
                    for i in range(REQUESTS)
                ]
                outcomes = await bench.outcomes(*(r.request_id for r in records))
                given = [decode(DispatchRecord, r.value) for r in tap.records]
        finally:
            await tap.stop()
        assert all(o.status is Status.COMPLETED and o.attempts == 1 for o in outcomes.values())
        assert Counter(r.request_id for r in given) == Counter(r.request_id for r in records)
        assert {r.scheduler_id for r in given} == names
        events = [e for e in await bench.events() if e.worker_id == worker.worker_id]
        assert max(e.running for e in events) <= SLOTS
        assert all(sum(e.credits.values()) <= SLOTS - e.running for e in events)

        async def granted_nothing() -> bool:
            return (await bench.events())[-1].credits == {}

        await until(granted_nothing, "the worker knows that both have left")
