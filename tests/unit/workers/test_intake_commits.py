"""A worker whose group coordinator is away: it reads on for a while, then no more (G10)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import GroupCoordinatorNotAvailableError

from contracts.errors import RecordError
from infra.tasks import end_tasks
from workers import intake
from workers.intake import Intake

PARTITION = TopicPartition("dispatch", 0)
#: Anything that is no record: what becomes of it is the same.
VALUE = b"{}"


class FakeConsumer:
    """One partition; its coordinator can be away."""

    def __init__(self) -> None:
        self.log: list[ConsumerRecord] = []
        self.read = 0
        self.stored: int | None = None
        self.away = False
        self.asked = 0

    def publish(self) -> None:
        offset = len(self.log)
        self.log.append(ConsumerRecord("dispatch", 0, offset, 0, 0, None, VALUE, None, 0, 0, []))

    async def getmany(self, *, timeout_ms: int, max_records: int) -> dict[TopicPartition, Any]:
        await asyncio.sleep(0)
        found = self.log[self.read : self.read + max_records]
        self.read += len(found)
        return {PARTITION: found} if found else {}

    async def position(self, partition: TopicPartition) -> int:
        return self.read

    async def end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {PARTITION: len(self.log)}

    async def committed(self, partition: TopicPartition) -> int | None:
        self.asked += 1
        if self.away:
            raise GroupCoordinatorNotAvailableError
        return self.stored

    async def commit(self, offsets: dict[TopicPartition, int]) -> None:
        if self.away:
            raise GroupCoordinatorNotAvailableError
        self.stored = offsets[PARTITION]


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_without_its_coordinator_a_worker_takes_no_more_and_goes_on_when_it_is_back_G10(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(intake, "_PAUSE_SECONDS", 0.001)
    consumer: Any = FakeConsumer()
    handled: list[int] = []

    async def reject(record: ConsumerRecord, error: RecordError) -> None:
        handled.append(record.offset)

    async def never(*_: Any) -> None:
        raise AssertionError("there is nothing to handle")

    reading = Intake(
        consumer, [PARTITION], handle=never, reject=reject, preempt=never, limit=8, stall_seconds=0.2
    )
    running = asyncio.ensure_future(reading.run())
    try:
        consumer.publish()
        await until(lambda: consumer.stored == 1)
        consumer.away = True
        consumer.publish()
        await until(lambda: handled == [0, 1])
        await until(reading.alarm.is_on)
        asked = consumer.asked
        consumer.publish()
        # Several rounds later, and for longer than a stall: neither read on, nor taken for stuck.
        await until(lambda: consumer.asked > asked + 50)
        assert handled == [0, 1]
        assert not running.done()
        consumer.away = False
        await until(lambda: handled == [0, 1, 2])
        await until(lambda: consumer.stored == 3)
        assert not reading.alarm.is_on()
    finally:
        await end_tasks([running])
