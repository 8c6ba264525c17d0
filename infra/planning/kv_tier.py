"""The KV tier in Redis: what it stores and moves, and from which bandwidth on loading beats recomputing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kv.layout import CHUNK_TOKENS

from .demand import Demand
from .memory import GB, Engine, Shape
from .roofline import prefill


@dataclass(frozen=True, slots=True)
class Load:
    """A cached prefix of one length: bringing it against computing it again."""

    tokens: int
    load_seconds: float
    recompute_seconds: float


@dataclass(frozen=True, slots=True)
class KvTier:
    """The tier for one deployment.

    Attributes:
        chunk_bytes: of one chunk of 256 tokens, all ranks together.
        conversation_bytes: of the mean conversation, prompt and reply.
        longest_bytes: of the longest context.
        write_bytes_s / read_bytes_s: at the peak, all replicas together.
        memory_bytes: of everything written within the time to live, at the mean rate of a day.
        redis_nodes: for memory and bandwidth.
        replica_bytes_s: what one replica loads at the most.
        break_even_bytes_s: bandwidth into one replica from which loading beats recomputing.
        least_tokens: shortest prefix worth loading; None = recomputing is always faster.
        loads: prefixes of some lengths.
    """

    chunk_bytes: float
    conversation_bytes: float
    longest_bytes: float
    write_bytes_s: float
    read_bytes_s: float
    memory_bytes: float
    redis_nodes: int
    replica_bytes_s: float
    break_even_bytes_s: float
    least_tokens: int | None
    loads: tuple[Load, ...]


def size_kv_tier(engine: Engine, shape: Shape, demand: Demand, context: int) -> KvTier:
    """What the tier needs if every new full chunk of the tiers that wait is kept.

    What several ranks hold is counted once.
    """
    assume, per_token, peak = engine.assume, engine.kv_token_bytes, demand.peak
    new_tokens = peak.prompt - peak.cached + peak.reply
    write = peak.rate * new_tokens * per_token
    read = peak.rate * peak.cached * assume.hits_from_redis * per_token
    memory = write * assume.mean_over_peak * assume.kv_ttl_seconds * assume.kv_memory_overhead
    by_memory = memory / (assume.kv_redis_gb * GB)
    by_bandwidth = (write + read) / (assume.kv_redis_gb_s * GB)
    bandwidth = load_bandwidth(engine, shape)
    lengths = [n for n in (1_024, 4_096, 16_384, 65_536, 262_144, 1_048_576) if n <= context]
    return KvTier(
        chunk_bytes=CHUNK_TOKENS * per_token,
        conversation_bytes=(peak.prompt + peak.reply) * per_token,
        longest_bytes=context * per_token,
        write_bytes_s=write,
        read_bytes_s=read,
        memory_bytes=memory,
        redis_nodes=math.ceil(max(by_memory, by_bandwidth)),
        replica_bytes_s=bandwidth,
        break_even_bytes_s=per_token / recompute_seconds(engine, shape, CHUNK_TOKENS) * CHUNK_TOKENS,
        least_tokens=_least_tokens(engine, shape, bandwidth, context),
        loads=tuple(_load(engine, shape, bandwidth, n) for n in lengths),
    )


def load_bandwidth(engine: Engine, shape: Shape) -> float:
    """Bytes/s from Redis into one replica: every node of it has a network of its own."""
    nodes = math.ceil(shape.gpus / engine.gpu.per_node)
    return nodes * engine.assume.kv_gb_s_per_node * GB


def recompute_seconds(engine: Engine, shape: Shape, tokens: float) -> float:
    """How much a prompt's prefix of so many tokens lengthens the work of a busy replica."""
    return prefill(engine, shape, tokens).busy_seconds


def load_seconds(engine: Engine, bandwidth: float, tokens: float) -> float:
    """One lookup, then the bytes; ranks load side by side, within the bandwidth of their nodes."""
    return engine.assume.kv_round_trip_ms / 1e3 + tokens * engine.kv_token_bytes / bandwidth


def _load(engine: Engine, shape: Shape, bandwidth: float, tokens: int) -> Load:
    return Load(
        tokens, load_seconds(engine, bandwidth, tokens), recompute_seconds(engine, shape, tokens)
    )


def _least_tokens(engine: Engine, shape: Shape, bandwidth: float, context: int) -> int | None:
    """In whole chunks. Recomputing grows faster than loading, so once loading wins it goes on winning."""
    low, high = 1, max(1, context // CHUNK_TOKENS)

    def wins(chunks: int) -> bool:
        tokens = chunks * CHUNK_TOKENS
        return load_seconds(engine, bandwidth, tokens) < recompute_seconds(engine, shape, tokens)

    if not wins(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle + 1, high)
    return low * CHUNK_TOKENS
