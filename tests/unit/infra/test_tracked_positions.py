"""Positions are committed explicitly, and a commit that fails costs nothing but time (G10 G13 G14)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import (
    CommitFailedError,
    GroupCoordinatorNotAvailableError,
    IllegalStateError,
    KafkaError,
)

from infra import kafka
from infra.commit_alarm import CommitAlarm
from infra.kafka import Tracked, make_consumer
from infra.settings import KafkaSettings

ZERO, ONE = TopicPartition("t", 0), TopicPartition("t", 1)


class FakeConsumer:
    """A consumer of two partitions whose commits do what the test says."""

    def __init__(self) -> None:
        self.stored: dict[TopicPartition, int] = {}
        self.failure: BaseException | None = None
        self.silent = False
        self.at: dict[TopicPartition, int] = {ZERO: 0, ONE: 0}

    async def commit(self, offsets: dict[TopicPartition, int]) -> None:
        if self.silent:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure
        self.stored |= offsets

    async def committed(self, partition: TopicPartition) -> int | None:
        if self.silent:
            await asyncio.Event().wait()
        return self.stored.get(partition)

    async def position(self, partition: TopicPartition) -> int:
        return self.at[partition]

    async def seek_to_beginning(self, partition: TopicPartition) -> None:
        self.at[partition] = 0


def record(partition: TopicPartition, offset: int) -> Any:
    return ConsumerRecord(partition.topic, partition.partition, offset, 0, 0, None, b"", None, 0, 0, [])


def tracked_on(consumer: Any) -> Tracked:
    return Tracked(consumer, CommitAlarm(0.0))


@pytest.mark.parametrize(
    "failure",
    [
        CommitFailedError("rebalanced"),
        IllegalStateError("not ours"),
        GroupCoordinatorNotAvailableError(),
    ],
)
async def test_a_failed_commit_is_no_crash_and_is_made_up_for_G10_G14(failure: KafkaError) -> None:
    consumer = FakeConsumer()
    tracked = tracked_on(consumer)
    tracked.take(record(ZERO, 0)).done()
    consumer.failure = failure
    await tracked.commit()
    assert tracked.alarm.is_on()
    assert not consumer.stored
    tracked.take(record(ZERO, 1)).done()
    consumer.failure = None
    await tracked.commit()
    assert consumer.stored == {ZERO: 2}
    assert not tracked.alarm.is_on()


async def test_a_commit_without_an_answer_has_a_deadline_G10(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "_COMMIT_SECONDS", 0.01)
    consumer = FakeConsumer()
    consumer.silent = True
    tracked = tracked_on(consumer)
    tracked.take(record(ZERO, 0)).done()
    await tracked.commit()
    assert tracked.alarm.is_on()
    for ask in (tracked.begin, tracked.start_over_if_forgotten):
        with pytest.raises(TimeoutError):
            await ask(ZERO)


async def test_each_partition_is_committed_by_its_own_number_G14() -> None:
    consumer = FakeConsumer()
    tracked = tracked_on(consumer)
    first = [tracked.take(record(ZERO, n)) for n in range(3)]
    tracked.take(record(ONE, 7)).done()
    first[0].done()
    first[2].done()
    await tracked.commit()
    assert consumer.stored == {ZERO: 1, ONE: 8}


async def test_nothing_is_committed_for_a_partition_that_was_taken_away_G14() -> None:
    consumer = FakeConsumer()
    tracked = tracked_on(consumer)
    gone, stays = tracked.take(record(ZERO, 5)), tracked.take(record(ONE, 5))
    await tracked.on_partitions_revoked([ZERO, ONE])
    again = tracked.take(record(ONE, 5))
    gone.done()
    stays.done()
    await tracked.commit()
    assert consumer.stored == {ONE: 5}, "the record that was read again is not done yet"
    again.done()
    await tracked.commit()
    assert consumer.stored == {ONE: 6}


async def test_commits_that_failed_before_a_rebalance_are_no_reason_to_stop_after_it_G10() -> None:
    consumer = FakeConsumer()
    tracked = tracked_on(consumer)
    tracked.take(record(ZERO, 0)).done()
    consumer.failure = CommitFailedError("rebalanced")
    await tracked.commit()
    assert tracked.alarm.is_on()
    await tracked.on_partitions_revoked([ZERO])
    await tracked.commit()
    assert not tracked.alarm.is_on()


async def test_starting_over_that_fails_half_way_is_done_again() -> None:
    consumer = FakeConsumer()
    tracked = tracked_on(consumer)
    consumer.at[ZERO] = 5
    await tracked.begin(ZERO)
    assert not await tracked.start_over_if_forgotten(ZERO)
    consumer.stored.clear()
    consumer.failure = GroupCoordinatorNotAvailableError()
    with pytest.raises(KafkaError):
        await tracked.start_over_if_forgotten(ZERO)
    consumer.failure = None
    assert await tracked.start_over_if_forgotten(ZERO)
    assert consumer.stored == {ZERO: 0}


async def test_no_consumer_commits_by_itself_G13() -> None:
    consumer = make_consumer(KafkaSettings(), group="g", client_id="c")
    assert consumer._enable_auto_commit is False
    await consumer.stop()
