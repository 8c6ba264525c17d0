"""Every number of a plan that is neither given nor a data sheet's: name, default, unit, source."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from pydantic.config import JsonDict

from .parts import Part


def _assumed(default: float, unit: str, source: str, *, least: float = 0, most: float = 1e12) -> Any:
    extra: JsonDict = {"unit": unit}
    return Field(default=default, description=source, ge=least, le=most, json_schema_extra=extra)


def _part(default: float, source: str, *, least: float = 0.01) -> Any:
    return _assumed(default, "of 1", source, least=least, most=1)


class Assumptions(Part):
    """The assumptions; each field's description is its source."""

    # Memory.
    memory_utilisation: float = _part(0.90, "part of the memory the engine may take (vLLM 0.32: 0.92)")
    workspace_gb: float = _assumed(
        3.0, "GB/GPU", "activations, CUDA graphs, communication buffers; vLLM prints it at start"
    )
    fp8_weight_bytes: float = _assumed(
        1.0, "bytes", "per parameter; scales are below 1 %", least=0.5, most=2
    )
    int4_weight_bytes: float = _assumed(
        0.53,
        "bytes",
        "per parameter: 4 bits, scale and zero point per 128, embeddings in BF16",
        least=0.5,
        most=2,
    )
    # Speed of a replica.
    compute_efficiency: float = _part(
        0.45, "part of peak FLOPS that large prefills reach; 0.4 to 0.6 is usual"
    )
    bandwidth_efficiency: float = _part(0.70, "part of memory bandwidth that decode steps reach")
    link_efficiency: float = _part(0.70, "part of the GPU link that all-reduce reaches")
    allreduce_us: float = _assumed(15, "µs", "latency of one all-reduce inside a node; two per layer")
    network_gb_s: float = _assumed(
        50, "GB/s", "per GPU between nodes, one direction: 400 Gb/s InfiniBand", least=0.01
    )
    hop_us: float = _assumed(50, "µs", "latency from one pipeline stage to the next")
    step_overhead_ms: float = _assumed(2.0, "ms", "scheduling, sampling and launch of one engine step")
    batched_tokens: int = _assumed(
        2_048, "tokens", "of a prefill chunk: worker.vllm.max_batched_tokens", least=64, most=1_000_000
    )
    max_running: int = _assumed(
        256, "replies", "of one replica at once, at the most: worker.max_seqs", least=1, most=65_536
    )
    block_tokens: int = _assumed(16, "tokens", "of a KV block (vLLM's default)", least=1, most=4_096)
    pp_most: int = _assumed(16, "stages", "longest pipeline considered", least=1, most=1_000)
    # Load and spare capacity.
    pipeline_ms: float = _assumed(20, "ms", "before prefill: gateway, moderation, Kafka, scheduler")
    wait_tail: float = _assumed(
        3.0, "times", "p95 of a wait over its mean: ln 20, if exponential", least=1, most=100
    )
    utilisation: float = _part(
        0.70, "part of what a replica can do that is planned for: bursts, uneven lengths"
    )
    spare_replicas: int = _assumed(1, "replicas", "beyond what the load needs: N+1", most=10_000)
    mean_over_peak: float = _part(
        0.50, "mean load of a day over its peak; batch work fills the difference"
    )
    requests_per_user_hour: float = _assumed(
        12, "1/h", "of a user who is online at the peak: one in 5 minutes", least=1e-6
    )
    # KV tier in Redis.
    hits_from_redis: float = _part(
        0.30, "part of the cached prompt tokens that Redis has to bring", least=0
    )
    kv_ttl_seconds: float = _assumed(1_800, "s", "how long a chunk nobody reads stays in Redis", least=1)
    kv_gb_s_per_node: float = _assumed(
        5.0, "GB/s", "from Redis into one GPU node: several connections over 100 Gb/s", least=1e-6
    )
    kv_round_trip_ms: float = _assumed(1.0, "ms", "of the lookup before a load")
    kv_memory_overhead: float = _assumed(
        1.1,
        "times",
        "Redis memory over the bytes of the values: allocator, keys, headers",
        least=1,
        most=10,
    )
    kv_redis_gb: float = _assumed(64, "GB", "memory of one Redis of the KV tier", least=0.001)
    kv_redis_gb_s: float = _assumed(
        1.5, "GB/s", "that one Redis moves: one core copies large values", least=1e-6
    )
    # Token streams, Kafka, edges.
    stream_entry_bytes: float = _assumed(
        40, "bytes", "Redis memory of one token in a stream; measured on Valkey 9.1: 22 to 43"
    )
    stream_seconds: float = _assumed(
        3_600, "s", "a stream stays after its seal: redis.retention_seconds"
    )
    stream_appends_per_second: float = _assumed(
        50_000, "1/s", "XADD of one Redis in pipelines of 64; measured: 56,000", least=1
    )
    text_bytes_per_token: float = _assumed(4.5, "bytes", "UTF-8 of English prose and JSON escapes")
    id_bytes_per_token: float = _assumed(6.0, "bytes", "of a token id in a JSON record")
    record_bytes: float = _assumed(1_200, "bytes", "of a Kafka record besides prompt and reply")
    kafka_copies: int = _assumed(3, "copies", "replication factor", least=1, most=10)
    kafka_path_hours: float = _assumed(
        24, "h", "retention of requests, queue, dispatch: contracts/topics.py"
    )
    kafka_outcome_hours: float = _assumed(720, "h", "retention of outcomes: contracts/topics.py")
    kafka_records_per_partition: float = _assumed(
        500,
        "1/s",
        "one consumer's pace with its Redis round trips; Faust alone forwards 4,000/s",
        least=1,
    )
    edge_frames_per_second: float = _assumed(
        20_000, "1/s", "of one edge process; the bare server: 47,000 to 81,000", least=1
    )
    edge_sockets: float = _assumed(
        5_000, "sockets", "of one edge process: memory and reconnect storms", least=1
    )
    frame_bytes: float = _assumed(
        180, "bytes", "of one token on the wire: 125 of JSON; websocket, TCP/IP"
    )


def describe(given: Assumptions) -> list[tuple[str, float, str, str, bool]]:
    """Name, value, unit, source, and whether it was changed, in the order of the sections."""
    rows = []
    for name, field in Assumptions.model_fields.items():
        extra = field.json_schema_extra
        unit = str(extra["unit"]) if isinstance(extra, dict) else ""
        value = getattr(given, name)
        rows.append((name, value, unit, field.description or "", value != field.default))
    return rows
