"""The watchdog over a Kafka consumer: does it still follow its log?

A consumer can stop without an error: its fetch task has ended, or the broker came back with a log that knows
nothing of our position. Seen from outside the position then stands still while the log has more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from aiokafka import TopicPartition as Partition
from aiokafka.errors import KafkaError

log = logging.getLogger(__name__)

#: Reads the positions of the partitions that ought to move: without those held back on purpose.
Positions = Callable[[], Awaitable[Mapping[Partition, int | None]]]
#: Reads the ends of the partitions' logs.
Ends = Callable[[Iterable[Partition]], Awaitable[Mapping[Partition, int]]]

_LOOKS_PER_PATIENCE = 2
_LOOK_SECONDS = 5.0


@dataclass
class StallWatch:
    """Judges from what is seen now and then. Pure: the caller brings time, positions and ends.

    Attributes:
        patience_seconds: how long a position may stand still before its log's end.
    """

    patience_seconds: float
    _standing: dict[Partition, tuple[int | None, float]] = field(default_factory=dict)

    def stalled(
        self, now: float, positions: Mapping[Partition, int | None], ends: Mapping[Partition, int]
    ) -> Partition | None:
        """A partition that no longer follows its log, if there is one.

        Args:
            now: monotonic seconds.
            positions: of the partitions that ought to move; any other starts anew when it comes back.
            ends: of the same partitions' logs; an unknown one is not judged.
        """
        before, self._standing = self._standing, {}
        for partition, position in positions.items():
            if partition not in ends or not _has_more(position, ends[partition]):
                continue
            stood_at, since = before.get(partition, (position, now))
            if stood_at != position:
                since = now
            elif now - since >= self.patience_seconds:
                return partition
            self._standing[partition] = (position, since)
        return None


def _has_more(position: int | None, end: int) -> bool:
    """Whether there is something to read.

    A position beyond the end says nothing: the embedded broker states the end of a batch of many as if it
    were a batch of one. A log that was lost is noticed by its forgotten group, or its forgotten position.
    """
    return position is None or position < end


async def until_stalled(positions: Positions, ends: Ends, patience_seconds: float) -> None:
    """Return when a partition no longer follows its log, which is logged. A silent broker is waited for."""
    watch = StallWatch(patience_seconds)
    before: Mapping[Partition, int | None] = {}
    while True:
        await asyncio.sleep(patience_seconds / _LOOKS_PER_PATIENCE)
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                at = await positions()
                # Only of those that stand: to say where a log ends is work for the embedded broker.
                standing = [p for p, position in at.items() if before.get(p, position) == position]
                before = at
                end = await ends(standing) if standing else {}
        except (KafkaError, TimeoutError):
            continue
        partition = watch.stalled(time.monotonic(), at, end)
        if partition is not None:
            log.error(
                "the consumer no longer follows its log",
                extra={
                    "topic": partition.topic,
                    "partition": partition.partition,
                    "position": at[partition],
                    "end": end[partition],
                },
            )
            return
