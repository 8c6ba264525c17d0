"""Reading the outcomes topic from its beginning to where it ended when the reading began.

Nothing is written, no group is joined, and nobody else is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiokafka.errors import KafkaError

from contracts.errors import RecordError
from contracts.records import OutcomeRecord, decode

from ..kafka import make_consumer
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
        gap: records before the topic's end that the broker did not give.
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
        StackError: no broker answers; one line for people.
    """
    patient = settings.model_copy(update={"doorbells": None, "fetch_max_wait_ms": 500})
    consumer = make_consumer(patient, group=None, client_id="headrace-export")
    tally = Tally()
    consumer.subscribe([settings.topics.outcomes])
    try:
        await consumer.start()
        partitions = consumer.assignment()
        ends = await consumer.end_offsets(partitions)
        positions = await consumer.beginning_offsets(partitions)
        total = sum(ends[p] - positions[p] for p in partitions)
        while any(positions[p] < ends[p] for p in partitions):
            batch = await consumer.getmany(timeout_ms=int(_SILENCE_SECONDS * 1000))
            if not batch:
                tally.gap = sum(ends[p] - positions[p] for p in partitions)
                break
            for partition, records in batch.items():
                for record in records:
                    positions[partition] = record.offset + 1
                    if record.offset < ends[partition]:
                        _take(record.value, wanted, shelf, tally)
            progress(tally.records, total)
    except KafkaError as error:
        raise StackError(f"{settings.bootstrap}: {type(error).__name__}") from None
    finally:
        await consumer.stop()
    return tally


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
