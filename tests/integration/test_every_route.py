"""What holds for every route of the gateway. They are found in the application: new ones are covered too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from infra.settings import DEV_PAID_KEY, Settings
from tests.api_document import documented_app, gateway_document
from tests.integration.gateway_fixture import Gateway, gateway_in_a_thread

ROUTES = [route for route in documented_app().routes if isinstance(route, APIRoute)]
#: Method and path of every documented call that needs a key, and those of them that take a JSON body.
CALLS = sorted(
    (method.upper(), path)
    for path, operations in gateway_document()["paths"].items()
    for method, operation in operations.items()
    if operation.get("security") != []
)
JSON_CALLS = sorted(
    (method.upper(), path)
    for path, operations in gateway_document()["paths"].items()
    for method, operation in operations.items()
    if "application/json" in operation.get("requestBody", {}).get("content", {})
)
NAMES = {
    "{request_id}": "chatcmpl-" + "0" * 32,
    "{response_id}": "resp_" + "0" * 32,
    "{conversation_id}": "conv_" + "0" * 32,
    "{item_id}": "msg_" + "0" * 32 + "_0",
    "{file_id}": "file-" + "0" * 32,
    "{batch_id}": "batch_" + "0" * 32,
    "{name}": "unknown",
}


@pytest.fixture(scope="module")
def gateway(
    module_settings: Callable[..., Settings], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    folder = str(tmp_path_factory.mktemp("files"))
    made = module_settings(http={"max_body_bytes": 65_536, "port": 0}, files={"url": folder})
    with gateway_in_a_thread(made) as running:
        yield running


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {DEV_PAID_KEY}"}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=20) as made:
        yield made


def address(path: str) -> str:
    for part, name in NAMES.items():
        path = path.replace(part, name)
    assert "{" not in path, f"NAMES lacks a part of {path}"
    return path


def refused(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which must be one in the API's shape and the caller's own fault."""
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_every_route_is_described_and_in_the_documentation() -> None:
    text = Path("docs/API.md").read_text()
    for route in ROUTES:
        if route.include_in_schema:
            assert route.summary, route.path
            assert route.path.split("{")[0].rstrip("/") in text, route.path


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_without_a_key_that_is_known_nothing_is_said_B7(
    gateway: Gateway, method: str, path: str
) -> None:
    for headers in ({}, {"Authorization": "Bearer sk-unknown"}, {"Authorization": "Basic x"}):
        answer = httpx.request(method, gateway.url + address(path), headers=headers, content=b"{}")
        assert answer.status_code == 401, answer.text
        assert refused(answer)["code"] == "invalid_api_key"


FIELDS = ("model", "messages", "input", "items", "metadata", "endpoint", "input_file_id")
DEEP = b'{"a":' * 5_000 + b"1" + b"}" * 5_000
BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "bytes that are no UTF-8": b'{"model":"\xff"}',
    "UTF-16": json.dumps({}).encode("utf-16"),
    "half a surrogate": b'{"model":"\\ud800","input":"\\ud800"}',
    "deep nesting": DEEP,
    "no object": b"[]",
    "null": b"null",
    "a number": b"7",
    "wrong types": json.dumps({field: [[{}]] for field in FIELDS}).encode(),
    "NUL": json.dumps({"model": "\x00", "metadata": {"\x00": 5}, "items": "\x00"}).encode(),
    "too large": b'{"model":"' + b"x" * 70_000 + b'"}',
}


@pytest.mark.parametrize(("method", "path"), JSON_CALLS)
def test_no_body_makes_it_fail_and_every_refusal_says_why_C5_C10(
    client: httpx.Client, method: str, path: str
) -> None:
    headers = {"Content-Type": "application/json"}
    for name, body in BODIES.items():
        answer = client.request(method, address(path), content=body, headers=headers)
        assert refused(answer)["message"], name
        if name == "too large":
            assert answer.status_code == 413
    answer = client.request(method, address(path), content=b"a=1", headers={"Content-Type": "text/csv"})
    assert refused(answer)["code"] in ("unsupported_media_type", "invalid_json")
