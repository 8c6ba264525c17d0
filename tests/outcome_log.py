"""The log that commands and the rebuild of history read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from infra.kafka import Publisher
from infra.settings import Settings
from infra.topics import ensure_topics


async def publish_outcomes(
    settings: Settings, values: Sequence[bytes], partition: int | None = None
) -> None:
    """Append records, of whatever content, to the outcomes topic; without ``partition`` all to one."""
    await ensure_topics(settings)
    publisher = Publisher(settings.kafka)
    await publisher.start()
    for value in values:
        await publisher.send(settings.kafka.topics.outcomes, value, key="k", partition=partition)
    await publisher.stop()


def lose_the_tail(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Make a broker say that each partition has ``count`` records more than it gives."""
    true_ends = AIOKafkaConsumer.end_offsets

    async def end_offsets(
        consumer: AIOKafkaConsumer, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        ends: dict[TopicPartition, int] = await true_ends(consumer, partitions)
        return {partition: end + count for partition, end in ends.items()}

    monkeypatch.setattr(AIOKafkaConsumer, "end_offsets", end_offsets)
