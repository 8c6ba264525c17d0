"""Reading the outcomes topic, or parts of it, to where it ended when the reading began.

Nothing is written, no group is joined, and nobody else is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from contracts.errors import RecordError
from contracts.records import OutcomeRecord, decode

from ..kafka import LogSilent, make_reader, read_to_end
from ..settings import KafkaSettings
from ..stack.errors import StackError
from .shelf import Shelf
from .turns import Wanted, conversation_of, turn_object

#: A broker that gives nothing for so long, though there is more, has lost it.
_SILENCE_SECONDS: Final = 20.0


@dataclass
class Tally:
    """What the log held.

    Attributes:
        unreadable: records that are none of this version.
        repeated: outcomes of requests that had one already.
        gap: records that the broker did not give, though it should have them.
    """

    records: int = 0
    unreadable: int = 0
    repeated: int = 0
    kept: int = 0
    gap: int = 0


async def read_outcomes(
    settings: KafkaSettings, wanted: Wanted, shelf: Shelf, progress: Callable[[int, int], None]
) -> Tally:
    """Put the wanted turns of the log on the shelf.

    Args:
        progress: called with the records read and those there are.

    Raises:
        StackError: no broker answers, or it has no such partition; one line for people.
    """
    consumer = make_reader(settings, settings.topics.outcomes, client_id="headrace-export")
    tally = Tally()
    try:
        await consumer.start()
        begins, ends = await _bounds(consumer, wanted)
        total = sum(ends[p] - begins[p] for p in ends)
        async for records in read_to_end(consumer, ends, _SILENCE_SECONDS):
            for record in records:
                _take(record.value, wanted, shelf, tally)
            progress(tally.records, total)
    except LogSilent as silent:
        tally.gap = silent.missing
    except KafkaError as error:
        raise StackError(f"{settings.bootstrap}: {type(error).__name__}") from None
    finally:
        await consumer.stop()
    return tally


async def _bounds(
    consumer: AIOKafkaConsumer, wanted: Wanted
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Where the reading of each partition begins, where the consumer now stands, and where it ends."""
    partitions = consumer.assignment()
    ends = await consumer.end_offsets(partitions)
    begins = await consumer.beginning_offsets(partitions)
    unknown = set(wanted.offsets) - {p.partition for p in partitions}
    if unknown:
        raise StackError(f"the log has partitions 0 to {len(partitions) - 1}, and no {min(unknown)}")
    for partition in partitions if wanted.offsets else ():
        begin, end = begins[partition], ends[partition]
        first, last = wanted.offsets.get(partition.partition, (0, -1))
        begins[partition] = min(max(begin, first), end)
        ends[partition] = end if last is None else min(max(begins[partition], last + 1), end)
        consumer.seek(partition, begins[partition])
        if begins[partition] == ends[partition]:
            consumer.pause(partition)
    return begins, ends


def _take(value: bytes | None, wanted: Wanted, shelf: Shelf, tally: Tally) -> None:
    tally.records += 1
    try:
        outcome = decode(OutcomeRecord, value)
    except RecordError:
        tally.unreadable += 1
        return
    if not wanted.takes(outcome):
        return
    if shelf.put(outcome.tenant, conversation_of(outcome), turn_object(outcome)):
        tally.kept += 1
    else:
        tally.repeated += 1
