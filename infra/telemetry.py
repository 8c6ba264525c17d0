"""Metrics and traces of every role.

Metrics are Prometheus, on ``/metrics`` of each role; labels are bounded (tiers, statuses, classes and
hops of the configuration, never ids or names from a request). Traces are OpenTelemetry, off unless the
standard ``OTEL_*`` variables name an exporter; spans are started and ended explicitly and never kept
current across a ``yield``, because a stream may be closed from another task.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import Counter, Gauge, Histogram

TRACEPARENT = "traceparent"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

REQUESTS = Counter(
    "headrace_requests_total", "Requests that ended, by their outcomes", ["tier", "status"]
)
ACCEPTED_REQUESTS = Counter("headrace_accepted_total", "Requests accepted", ["tier"])
REFUSED_CALLS = Counter("headrace_refused_calls_total", "Calls refused at the door", ["code"])
LIMITED = Counter(
    "headrace_limited_calls_total", "Calls refused because a limit was reached", ["limit", "tier"]
)
TOKENS = Counter(
    "headrace_tokens_total", "Tokens of ended requests, by their outcomes", ["tier", "kind"]
)
TTFT = Histogram("headrace_ttft_seconds", "Acceptance to first token", ["tier"], buckets=_SECONDS)
TPOT = Histogram(
    "headrace_tpot_seconds", "Time per output token after the first", ["tier"], buckets=_SECONDS
)
ENGINE_TTFT = Histogram("headrace_engine_ttft_seconds", "Attempt start to first token", buckets=_SECONDS)
RUNNING = Gauge("headrace_running", "Replies this worker generates")
KV_FREE = Gauge("headrace_kv_free_tokens", "Tokens the KV cache of this worker has room for")
KV_TOKENS = Counter(
    "headrace_kv_tokens_total",
    "Tokens looked up in the KV tier, found there, and computed although found as that is faster",
    ["what"],
)
KV_BYTES = Counter(
    "headrace_kv_bytes_total", "Bytes loaded from and saved to the KV tier", ["direction"]
)
KV_LOOKUPS = Counter("headrace_kv_lookups_total", "Lookups in the KV tier")
KV_LOOKUP_SECONDS = Counter("headrace_kv_lookup_seconds_total", "Time of answered lookups")
KV_LOAD_SECONDS = Counter("headrace_kv_load_seconds_total", "Time of loads, each from start to end")
KV_FAILURES = Counter(
    "headrace_kv_failures_total",
    "Lookups, loads and saves that came to nothing",
    ["operation", "reason"],
)
KV_US_PER_TOKEN = Gauge(
    "headrace_kv_us_per_token", "Microseconds to load a token from the KV tier, to prefill one", ["what"]
)
QUEUE_DEPTH = Gauge("headrace_queue_depth", "Requests waiting in the scheduler", ["queue_class"])
QUEUE_WAIT = Histogram(
    "headrace_queue_wait_seconds", "Moderated to dispatched", ["queue_class"], buckets=_SECONDS
)
DISPATCHED_TOKENS = Counter(
    "headrace_dispatched_prompt_tokens_total",
    "Prompt tokens dispatched, by where the scheduler expects them: worker, tier, or computed",
    ["source"],
)
OVERLOAD_STEP = Gauge("headrace_overload_step", "Step of the overload ladder, 0 is normal", ["pool"])
DEGRADED = Counter(
    "headrace_degraded_total", "Requests that got less, or were refused", ["step", "tier"]
)
HOP = Histogram(
    "headrace_hop_seconds", "Time from the previous hop's stamp to this one", ["hop"], buckets=_SECONDS
)
DEAD_LETTERS = Counter("headrace_deadletters_total", "Records dead-lettered", ["stage", "reason"])
FENCED = Counter("headrace_fenced_total", "Appends refused because another attempt took over")
TAKEOVERS = Counter("headrace_takeovers_total", "Replies continued from another worker's tokens")
PREEMPTED = Counter("headrace_preempted_total", "Replies stopped to make room for others")
REDISPATCHES = Counter("headrace_redispatches_total", "Requests dispatched again after an attempt")
LEFT_REQUESTS = Counter("headrace_left_total", "Requests ended as all readers had left", ["stage"])
REAPED = Counter("headrace_reaped_total", "Open requests ended by the reaper", ["code"])
COMMITS_FAILING = Gauge(
    "headrace_commits_failing_seconds", "How long no Kafka position could be committed; 0 is well"
)
BATCHES = Counter("headrace_batches_total", "Batches that are over", ["status"])
BATCH_LINES = Counter(
    "headrace_batch_lines_total", "Lines of batches with a result on the storage", ["result"]
)
BATCH_LINES_RUNNING = Gauge(
    "headrace_batch_lines_running", "Lines this batch runner has in the pipeline"
)
READERS = Gauge("headrace_readers", "Readers of token streams in this process")
CATCH_UPS = Counter("headrace_reader_catch_ups_total", "Readers that fell behind and read from Redis")
SOCKETS = Gauge("headrace_sockets", "Open websockets")

_propagator = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("headrace")


def configure_tracing(role: str) -> TracerProvider | None:
    """Install the exporter the ``OTEL_*`` variables ask for; None (and no cost) when they ask for none.

    ``OTEL_TRACES_EXPORTER`` is ``otlp`` (the default once an OTLP endpoint is set), ``console`` or
    ``none``; the exporters read their own variables.
    """
    endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    default = "otlp" if any(os.environ.get(name) for name in endpoint) else "none"
    wanted = os.environ.get("OTEL_TRACES_EXPORTER", default)
    if wanted == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    exporter: SpanExporter
    if wanted == "console":
        exporter = ConsoleSpanExporter()
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    provider = TracerProvider(resource=Resource.create({"service.name": f"headrace-{role}"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return provider


def start_span(
    name: str,
    traceparent: str | None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, Any] | None = None,
) -> Span:
    """Start a span under ``traceparent`` (a W3C header value, or None for a new trace). End it yourself."""
    parent = _propagator.extract({TRACEPARENT: traceparent}) if traceparent else None
    return _tracer.start_span(name, context=parent, kind=kind, attributes=dict(attributes or {}))


def traceparent_of(span: Span) -> str | None:
    """The W3C header value that makes another process's spans children of ``span``; None when off."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    return carrier.get(TRACEPARENT)


def end_span(span: Span, error: str | None = None) -> None:
    """End a span; ``error`` is a code or class name, never user content."""
    if error is not None:
        span.set_status(Status(StatusCode.ERROR, error))
        span.set_attribute("error.type", error)
    span.end()


def trace_headers(traceparent: str | None) -> list[tuple[str, bytes]]:
    """Kafka record headers that carry the trace context."""
    return [(TRACEPARENT, traceparent.encode())] if traceparent else []


def traceparent_from(headers: Any) -> str | None:
    """The trace context of a Kafka record, or None."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers or ()
    for name, value in pairs:
        if name == TRACEPARENT and value and len(value) <= 128:
            return bytes(value).decode("ascii", "replace")
    return None
