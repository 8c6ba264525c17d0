"""P2: one request is one trace, across every role's process."""

from __future__ import annotations

import http.server
import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from websockets.sync.client import connect

from tests.stack_process import PAID_KEY, StackProcess, eventually


class Collector:
    """An OTLP receiver on loopback that keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    names = {a.key: a.value.string_value for a in resource.resource.attributes}
                    for scope in resource.scope_spans:
                        outer.spans += [(names["service.name"], span) for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def services_of(self, trace_id: bytes) -> set[str]:
        return {service for service, span in self.spans if span.trace_id == trace_id}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()


@pytest.fixture(scope="module")
def traced_stack(
    collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StackProcess]:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    data = tmp_path_factory.mktemp("traced") / "data"
    with StackProcess(data, "--engine", "sim", "--sim-tpot-ms", "2", env=env) as stack:
        stack.wait_ready(60)
        yield stack


BODY = {
    "model": "default",
    "messages": [{"role": "user", "content": "a secret plan nobody may read"}],
    "max_tokens": 5,
}


def test_p2_an_http_request_is_one_trace_under_the_callers(
    traced_stack: StackProcess, collector: Collector
) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    request = urllib.request.Request(
        f"{traced_stack.url}/v1/chat/completions",
        data=json.dumps(BODY).encode(),
        headers={
            "Authorization": f"Bearer {PAID_KEY}",
            "Content-Type": "application/json",
            "traceparent": f"00-{trace}-b7ad6b7169203331-01",
        },
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200
    roles = {"gateway", "moderation", "scheduler", "worker"}
    wanted = {f"headrace-{role}" for role in roles}
    eventually(lambda: wanted <= collector.services_of(bytes.fromhex(trace)), 20, "a span of every role")
    spans = [span for _, span in collector.spans if span.trace_id == bytes.fromhex(trace)]
    assert all(span.end_time_unix_nano for span in spans)
    text = "".join(str(span) for span in spans)
    assert "gen_ai.request.model" in text
    assert "secret plan" not in text


def test_p2_a_websocket_request_is_one_trace(traced_stack: StackProcess, collector: Collector) -> None:
    with connect(
        traced_stack.ws_url, additional_headers={"Authorization": f"Bearer {PAID_KEY}"}
    ) as socket:
        socket.send(json.dumps({"type": "chat.create", "ref": "r", "body": BODY}))
        while json.loads(socket.recv(timeout=30))["type"] != "stream.end":
            pass
    wanted = {f"headrace-{role}" for role in ("edge", "moderation", "scheduler", "worker")}
    eventually(
        lambda: any(wanted <= collector.services_of(span.trace_id) for _, span in collector.spans),
        20,
        "a trace that starts at the edge",
    )


def test_the_data_folder_of_a_traced_stack_holds_no_prompt_in_its_logs(
    traced_stack: StackProcess,
) -> None:
    logs = list(Path(traced_stack.data_dir, "logs").iterdir())
    assert logs
    assert not [log.name for log in logs if "secret plan" in log.read_text(errors="replace")]
