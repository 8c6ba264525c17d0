"""What surrounds the GPUs of a plan, as tables of text."""

from __future__ import annotations

from infra.planning.kv_tier import KvTier
from infra.planning.pipeline import Pipeline
from infra.planning.plan import Cost

from .rows import Rows


def size_text(amount: float) -> str:
    """Bytes as people read them: ``512 kB``, ``67.6 GB``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= scale:
            return f"{amount / scale:,.3g} {unit}" if amount < 1e15 else f"{amount / scale:,.0f} {unit}"
    return f"{amount:.0f} B"


def time_text(seconds: float) -> str:
    """Seconds as people read them: ``48.6 ms``, ``1.46 s``."""
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def kv_tier_rows(tier: KvTier) -> Rows:
    """What the tier stores and moves."""
    least = f"{tier.least_tokens:,} tokens" if tier.least_tokens else "never: recompute"
    rows: list[tuple[str, ...]] = [
        (
            "chunk of 256 tokens; mean conversation",
            f"{size_text(tier.chunk_bytes)}; {size_text(tier.conversation_bytes)}",
        ),
        ("one conversation of the longest context", size_text(tier.longest_bytes)),
        (
            "written; loaded, at the peak",
            f"{size_text(tier.write_bytes_s)}/s; {size_text(tier.read_bytes_s)}/s",
        ),
        ("memory, if everything is kept for kv_ttl_seconds", size_text(tier.memory_bytes)),
        ("Redis instances for memory and bandwidth", f"{tier.redis_nodes:,}"),
        ("bandwidth into one replica", f"{size_text(tier.replica_bytes_s)}/s"),
        ("break-even bandwidth: above it loading is faster", f"{size_text(tier.break_even_bytes_s)}/s"),
        ("shortest prefix worth loading", least),
    ]
    return Rows("KV tier in Redis", 1, ("", "value"), rows)


def load_rows(tier: KvTier) -> Rows:
    """Loading against recomputing, by length."""
    rows: list[tuple[str, ...]] = [
        (
            f"{load.tokens:,} tokens",
            time_text(load.load_seconds),
            time_text(load.recompute_seconds),
            f"{load.recompute_seconds / load.load_seconds:.1f}x",
        )
        for load in tier.loads
    ]
    return Rows("Load or recompute", 1, ("cached prefix of", "load", "recompute", "faster by"), rows)


def topic_rows(pipeline: Pipeline) -> Rows:
    """Kafka."""
    rows: list[tuple[str, ...]] = [
        (
            topic.name,
            f"{topic.records_s:,.1f}",
            f"{size_text(topic.bytes_s)}/s",
            f"{topic.partitions:,}",
            size_text(topic.stored_bytes),
        )
        for topic in pipeline.topics
    ]
    heads = ("topic", "records/s", "written", "partitions, at least", "stored, all copies")
    return Rows("Kafka", 1, heads, rows)


def around_rows(pipe: Pipeline, cost: Cost | None) -> Rows:
    """Token streams, edge and cost."""
    rows: list[tuple[str, ...]] = [
        (
            "token streams: entries/s; Redis memory",
            f"{pipe.stream_appends_s:,.0f}; {size_text(pipe.stream_bytes)}",
        ),
        ("token streams: Redis primaries, a replica each", f"{pipe.stream_redis:,}"),
        (
            "edge: sockets; frames/s",
            f"{pipe.sockets:,.0f}; {pipe.frames_s:,.0f} ({size_text(pipe.frame_bytes_s)}/s)",
        ),
        ("edge processes, spare ones included", f"{pipe.edges:,}"),
    ]
    if cost:
        rows += [
            ("GPUs per hour, day and night", f"$ {cost.per_hour:,.2f}"),
            ("per million output tokens, at a day's mean load", f"$ {cost.per_million_output:,.2f}"),
            ("per million prompt and output tokens", f"$ {cost.per_million:,.2f}"),
            ("per million output tokens, all replicas full", f"$ {cost.per_million_output_full:,.2f}"),
        ]
    return Rows("Token streams, edge, cost of the GPUs", 1, ("", "value"), rows)
