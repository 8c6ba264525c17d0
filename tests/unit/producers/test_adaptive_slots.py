"""How many lines of batches run: as many as what else goes through moderation does not notice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from producers.batch.adaptive_slots import AdaptiveSlots

FEW = 2


class Pipeline:
    """Lines one after another through a moderation whose time depends on how many run."""

    def __init__(self, seconds: Callable[[int], float], most: int = 32) -> None:
        self.now = 100.0
        self.slots = AdaptiveSlots(most, lambda: self.now)
        self.seconds = seconds
        self.limits: list[int] = []

    async def lines(self, count: int) -> None:
        held = 0
        for _ in range(count):
            while held > self.slots.limit:
                self.slots.release()
                held -= 1
            while held < self.slots.limit:
                await asyncio.wait_for(self.slots.acquire(), 1)
                held += 1
            took = self.seconds(held)
            self.now += took / held
            self.slots.timed(took)
            self.limits.append(self.slots.limit)
        for _ in range(held):
            self.slots.release()


async def test_an_idle_pipeline_is_filled() -> None:
    pipeline = Pipeline(lambda _: 0.01)
    await pipeline.lines(2_000)
    assert max(pipeline.limits) == 32
    assert pipeline.slots.limit == 32


async def test_lines_stay_where_the_pipeline_is_not_slowed_down_much() -> None:
    """From 8 lines on each one more costs a quarter of the undisturbed time."""
    pipeline = Pipeline(lambda held: 0.01 * (1 + max(0, held - 8) / 4))
    await pipeline.lines(4_000)
    settled = pipeline.limits[1_000:]
    assert sum(settled) / len(settled) == pytest.approx(11, abs=1.5)
    assert max(settled) <= 13


async def test_lines_make_room_when_others_come_and_take_it_back_when_they_go() -> None:
    others = 0.0
    pipeline = Pipeline(lambda held: 0.01 * (1 + others * held))
    await pipeline.lines(1_500)
    assert pipeline.slots.limit == 32
    others = 0.1
    await pipeline.lines(1_500)
    assert pipeline.slots.limit < 16
    others = 0.0
    await pipeline.lines(1_500)
    assert pipeline.slots.limit == 32


async def test_a_pipeline_that_has_become_slower_is_no_reason_to_stand_still() -> None:
    slower = 1.0
    pipeline = Pipeline(lambda _: 0.01 * slower)
    await pipeline.lines(1_000)
    slower = 4.0
    await pipeline.lines(30_000)  # the undisturbed time is found out again every 30 s
    assert pipeline.slots.limit == 32


async def test_never_more_lines_than_may_run_and_none_is_lost() -> None:
    """Random lines come, leave and are cancelled while the limit moves."""
    rng = random.Random(7)
    slots = AdaptiveSlots(16)
    running = 0
    most = 0

    async def line() -> None:
        nonlocal running, most
        await slots.acquire()
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(rng.random() / 500)
            slots.timed(rng.random())
        finally:
            running -= 1
            slots.release()

    tasks = [asyncio.create_task(line()) for _ in range(600)]
    for task in rng.sample(tasks, 200):
        await asyncio.sleep(0.0005)
        task.cancel()
    await asyncio.wait(tasks, timeout=20)
    assert all(task.done() for task in tasks)
    assert (running, most <= 16) == (0, True)
    for _ in range(FEW):
        await asyncio.wait_for(slots.acquire(), 1)


async def test_who_waited_longest_comes_first() -> None:
    slots = AdaptiveSlots(1)
    await slots.acquire()
    order: list[int] = []

    async def line(number: int) -> None:
        await slots.acquire()
        order.append(number)
        slots.release()

    tasks = [asyncio.create_task(line(number)) for number in range(5)]
    await asyncio.sleep(0)
    slots.release()
    await asyncio.gather(*tasks)
    assert order == list(range(5))
