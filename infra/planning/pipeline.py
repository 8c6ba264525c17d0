"""Everything around the GPUs: Kafka, the Redis of the token streams, edges and gateways."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kv.layout import CHUNK_TOKENS

from .assumptions import Assumptions
from .demand import Demand

#: ``"<32 hex digits>",`` for each full chunk of a prompt.
_HASH_BYTES = 35
_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic, or a group of equal ones.

    Attributes:
        records_s / bytes_s: written at the peak, before replication.
        partitions: for its consumers' pace, and one per worker where the scheduler addresses workers.
        stored_bytes: by retention and replication, at the mean rate of a day.
    """

    name: str
    records_s: float
    bytes_s: float
    partitions: int
    stored_bytes: float


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What surrounds the GPUs.

    Attributes:
        topics: Kafka.
        stream_appends_s / stream_bytes / stream_redis: token streams: entries/s, memory, primaries.
        sockets / frames_s / frame_bytes_s / edges: of the edge; a frame is one token of one reply.
    """

    topics: tuple[Topic, ...]
    stream_appends_s: float
    stream_bytes: float
    stream_redis: int
    sockets: float
    frames_s: float
    frame_bytes_s: float
    edges: int


def size_pipeline(assume: Assumptions, demand: Demand, workers: int) -> Pipeline:
    """For the whole load, batch at its mean, with ``workers`` replicas.

    One request is a record in each of requests, queue, dispatch and outcomes.
    """
    batch = demand.mean.rate - demand.peak.rate * assume.mean_over_peak
    rate = demand.peak.rate + batch
    mix = demand.mean
    text = mix.prompt * assume.text_bytes_per_token
    ids = mix.prompt * assume.id_bytes_per_token + mix.prompt / CHUNK_TOKENS * _HASH_BYTES
    reply = mix.reply * assume.text_bytes_per_token
    spare = assume.utilisation
    consumers = math.ceil(rate / (assume.kafka_records_per_partition * spare))
    hours = (assume.kafka_path_hours, assume.kafka_outcome_hours)
    sizes = (
        ("requests", text, consumers, hours[0]),
        ("queue.*", ids, consumers, hours[0]),
        ("dispatch.*", ids, max(1, workers), hours[0]),
        ("outcomes", text + reply, consumers, hours[1]),
    )
    mean = demand.mean.rate
    topics = tuple(
        Topic(
            name,
            rate,
            rate * (size + assume.record_bytes),
            partitions,
            mean * (size + assume.record_bytes) * kept * _HOUR * assume.kafka_copies,
        )
        for name, size, partitions, kept in sizes
    )
    tokens = demand.peak.rate * demand.peak.reply + batch * mix.reply
    frames = demand.peak.rate * demand.peak.reply
    by_load = max(
        frames / (assume.edge_frames_per_second * spare), demand.users / (assume.edge_sockets * spare)
    )
    return Pipeline(
        topics=topics,
        stream_appends_s=tokens,
        stream_bytes=mean * mix.reply * assume.stream_seconds * assume.stream_entry_bytes,
        stream_redis=math.ceil(tokens / (assume.stream_appends_per_second * spare)),
        sockets=demand.users,
        frames_s=frames,
        frame_bytes_s=frames * assume.frame_bytes,
        edges=math.ceil(by_load) + assume.spare_replicas,
    )
