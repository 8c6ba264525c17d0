"""Names, partitions and retention of every Kafka topic, in one place."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

from .tiers import QueueClass

#: Characters allowed in pool names, which become part of topic names and Redis keys.
POOL_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,47}", re.ASCII)

_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS


@dataclass(frozen=True)
class TopicSpec:
    """A topic as it must exist on the broker.

    Attributes:
        name: full name, prefix included.
        partitions: number of partitions; consumers scale up to it.
        retention_ms: how long Kafka keeps its records.
        max_message_bytes: largest record the broker takes.
    """

    name: str
    partitions: int
    retention_ms: int
    max_message_bytes: int = 8 * 1024 * 1024


@dataclass(frozen=True)
class Topics:
    """The topic names of one deployment, all under ``prefix`` (for several deployments on one Kafka).

    ``partitions`` applies to the request path; a dispatch topic has ``worker_partitions`` for each of the
    ``worker_slots`` of its pool, because the scheduler addresses a worker by its partitions.
    """

    prefix: str = "headrace"
    partitions: int = 8
    worker_slots: int = 64
    worker_partitions: int = 1

    @property
    def requests(self) -> str:
        """Accepted requests, from the gateway to moderation; keyed by request id."""
        return f"{self.prefix}.requests"

    def queue(self, queue_class: QueueClass) -> str:
        """Moderated, tokenized requests waiting to be scheduled; keyed by request id."""
        return f"{self.prefix}.queue.{queue_class.value}"

    def dispatch(self, pool: str) -> str:
        """Work for the workers of ``pool``; which partitions are whose: :meth:`partitions_of`."""
        return f"{self.prefix}.dispatch.{pool}"

    def partitions_of(self, slot: int) -> range:
        """The partitions of a dispatch topic that the worker in ``slot`` reads."""
        return range(slot * self.worker_partitions, (slot + 1) * self.worker_partitions)

    def partition_for(self, slot: int, request_id: str) -> int:
        """Which of them has what is about a request: one, so that it is read in the order it was sent."""
        own = self.partitions_of(slot)
        return own[zlib.crc32(request_id.encode()) % len(own)]

    @property
    def outcomes(self) -> str:
        """One record per finished request (at least once; idempotent by request id)."""
        return f"{self.prefix}.outcomes"

    @property
    def deadletter(self) -> str:
        """Records that could not be read or handled, with the reason."""
        return f"{self.prefix}.deadletter"

    @property
    def queues(self) -> dict[str, QueueClass]:
        """Topic name to queue class, highest priority first."""
        return {self.queue(c): c for c in QueueClass}

    def specs(self, pools: list[str]) -> list[TopicSpec]:
        """Every topic that must exist when the worker pools are ``pools``."""
        path = [self.requests, *self.queues]
        dispatch = self.worker_slots * self.worker_partitions
        return [
            *(TopicSpec(name, self.partitions, _DAY_MS) for name in path),
            *(TopicSpec(self.dispatch(p), dispatch, _DAY_MS) for p in sorted(set(pools))),
            TopicSpec(self.outcomes, self.partitions, 30 * _DAY_MS),
            TopicSpec(self.deadletter, 1, 7 * _DAY_MS),
        ]
