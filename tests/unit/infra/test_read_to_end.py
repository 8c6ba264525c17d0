"""Reading a topic to where it ended: by the consumer's positions, never by the records alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import TopicPartition

from infra.kafka import LogSilent, read_to_end
from tests.unit.infra.test_tracked_positions import ONE, ZERO, record


class Log:
    """A consumer that is given batches: records, and the positions at which it stands after them."""

    def __init__(self, *steps: tuple[list[Any], dict[TopicPartition, int]]) -> None:
        self._steps = list(steps)
        self.at = {ZERO: 0, ONE: 0}
        self.lost = False

    async def position(self, partition: TopicPartition) -> int:
        if self.lost:
            await asyncio.Event().wait()
        return self.at[partition]

    async def getmany(self, *, timeout_ms: int) -> dict[TopicPartition, list[Any]]:
        if not self._steps:
            await asyncio.sleep(min(0.01, timeout_ms / 1000))
            return {}
        records, moved = self._steps.pop(0)
        self.at |= moved
        return {
            p: some for p in (ZERO, ONE) if (some := [r for r in records if r.partition == p.partition])
        }


async def read(log: Any, ends: dict[TopicPartition, int], silence: float = 5.0) -> list[tuple[int, int]]:
    batches = [batch async for batch in read_to_end(log, ends, silence)]
    assert all(batches)
    return [(r.partition, r.offset) for batch in batches for r in batch]


async def test_holes_and_the_marks_of_transactions_are_passed_over() -> None:
    log = Log(
        ([record(ZERO, 1), record(ZERO, 4)], {ZERO: 5}),
        ([], {ZERO: 6}),  # a mark at the end, which no record stands for
        ([record(ONE, 0)], {ONE: 2}),
    )
    assert await read(log, {ZERO: 6, ONE: 2}) == [(0, 1), (0, 4), (1, 0)]


async def test_what_comes_after_the_end_is_left_out() -> None:
    log = Log(([record(ZERO, 0), record(ZERO, 1), record(ONE, 0)], {ZERO: 2, ONE: 1}))
    assert await read(log, {ZERO: 1, ONE: 0}) == [(0, 0)]


async def test_nothing_is_asked_of_an_empty_log() -> None:
    assert await read(Log(), {ZERO: 0, ONE: 0}) == []


async def test_a_broker_that_gives_no_more_is_told_with_what_is_missing() -> None:
    log = Log(([record(ZERO, 0)], {ZERO: 1}))
    with pytest.raises(LogSilent) as silent:
        await read(log, {ZERO: 4, ONE: 2}, silence=0.05)
    assert silent.value.missing == 5


async def test_a_position_that_is_never_known_is_silence_too() -> None:
    log = Log()
    log.lost = True
    with pytest.raises(LogSilent):
        await read(log, {ZERO: 4}, silence=0.05)
