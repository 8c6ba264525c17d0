"""Start, drain, deadlines and traces of a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import infra.telemetry
from infra.settings import Settings
from tests.integration.gateway_fixture import Gateway, eventually, running_gateway
from tests.integration.pipeline_double import script

URL = "/v1/chat/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(infra.telemetry, "_tracer", provider.get_tracer("headrace"))
    yield memory
    provider.shutdown()


@pytest.fixture
async def gateway(settings: Callable[..., Settings]) -> AsyncIterator[Gateway]:
    async with running_gateway(settings(drain_seconds=0.3)) as running:
        yield running


async def test_d5_a_request_nothing_starts_is_expired_at_its_deadline(
    settings: Callable[..., Settings],
) -> None:
    tiers = {"paid": {"queue_class": "interactive", "max_wait_seconds": 0.1}}
    async with running_gateway(settings(tiers=tiers)) as gateway:
        gateway.double.silent = True
        bodies = [{"model": "default", "messages": script(), "stream": s} for s in (False, True)]
        for response in await asyncio.gather(*(gateway.http.post(URL, json=b) for b in bodies)):
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (504, "deadline_exceeded")


async def test_h11_not_ready_without_kafka(gateway: Gateway) -> None:
    async def ready() -> bool:
        return (await gateway.http.get("/readyz")).status_code == 200

    await eventually(ready, "the gateway is ready")
    await gateway.role._publisher.stop()
    answer = await gateway.http.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["reason"]
    refused = await gateway.http.post(URL, json={"model": "default", "messages": script()})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")


async def test_p2_one_root_span_whose_context_goes_with_the_request(
    exporter: InMemorySpanExporter, gateway: Gateway
) -> None:
    body = {"model": "default", "messages": script(), "stream": True}
    response = await gateway.http.post(URL, json=body, headers={"traceparent": PARENT})
    request_id = response.headers["x-request-id"]
    span = await ended(exporter)
    assert span.name == "chat headrace-sim"
    assert span.parent is not None
    assert span.context is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    sent = gateway.double.headers[request_id]["traceparent"].decode()
    assert sent == f"00-0af7651916cd43dd8448eb211c80319c-{span.context.span_id:016x}-01"
    assert span.attributes is not None
    assert span.attributes["gen_ai.response.id"] == request_id
    assert span.attributes["gen_ai.usage.output_tokens"] == 2
    assert span.attributes["headrace.outcome"] == "completed"


async def test_p4_p7_a_client_that_leaves_ends_the_span_without_an_error(
    exporter: InMemorySpanExporter, gateway: Gateway
) -> None:
    play = script(tokens=["a"] * 5, hold_before=3)
    body = {"model": "default", "messages": play, "stream": True}
    async with gateway.http.stream("POST", URL, json=body) as response:
        async for line in response.aiter_lines():
            if line == "id: 1-2":
                break
    span = await ended(exporter)
    assert span.attributes is not None
    assert span.attributes["headrace.outcome"] == "client_closed"
    assert span.status.status_code is StatusCode.UNSET
    late = {"model": "default", "messages": script(tokens=["a"], hold_before=-1)}
    with pytest.raises(httpx.TimeoutException):
        await gateway.http.post(URL, json=late, timeout=0.3)
    assert (await ended(exporter, 2)).attributes is not None


async def ended(exporter: InMemorySpanExporter, count: int = 1) -> ReadableSpan:
    async def there() -> bool:
        return len(exporter.get_finished_spans()) >= count

    await eventually(there, f"{count} spans are ended")
    spans = exporter.get_finished_spans()
    assert len(spans) == count
    return spans[-1]
