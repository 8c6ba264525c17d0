"""Whatever goes wrong over HTTP, the answer is in the API's shape and carries an ``x-request-id``."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest

from infra.settings import Settings
from producers.http_server import MAX_HEAD_BYTES
from producers.queue_depth import DEPTH_KEY
from tests.integration.gateway_fixture import Gateway, eventually, running_gateway
from tests.integration.pipeline_double import script

URL = "/v1/chat/completions"


@pytest.fixture
async def gateway(settings: Callable[..., Settings]) -> AsyncIterator[Gateway]:
    async with running_gateway(settings(http={"max_body_bytes": 65_536, "port": 0})) as running:
        yield running


def error_of(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    return error


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "default", "messages": script(), **fields}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"not json",
        b"\xff\xfe{}",
        b'{"model":"default","temperature":NaN}',
        b'{"model":"default","temperature":Infinity}',
        b'{"model":"default","messages":[{"role":"user","content":"hi \\ud83d"}]}',
        b"[" * 5_000,
        json.dumps(body()).encode("utf-16"),
        json.dumps(body()).encode() + b"x",
    ],
)
async def test_a11_c5_c10_what_is_no_json_is_invalid_json(gateway: Gateway, raw: bytes) -> None:
    error_of(await gateway.http.post(URL, content=raw), 400, "invalid_json")


@pytest.mark.parametrize("value", [[], [1], "x", None, 5])
async def test_c10_json_that_is_no_object_is_refused(gateway: Gateway, value: Any) -> None:
    raw = json.dumps(value).encode()
    error_of(await gateway.http.post(URL, content=raw), 400, "invalid_request")


async def test_c10_media_types(gateway: Gateway) -> None:
    raw = json.dumps(body()).encode()

    async def post(content: bytes, **headers: str) -> httpx.Response:
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        return await gateway.http.post(URL, content=content, headers=named)

    error_of(await post(raw, content_type="text/plain"), 415, "unsupported_media_type")
    error_of(await post(raw, content_type="multipart/form-data"), 415, "unsupported_media_type")
    packed = gzip.compress(raw)
    error_of(await post(packed, content_encoding="gzip"), 415, "unsupported_media_type")
    assert (await post(raw)).status_code == 200
    assert (await post(raw, content_type="application/json; charset=utf-8")).status_code == 200


async def test_f4_too_large_bodies_are_413_with_and_without_a_length(gateway: Gateway) -> None:
    raw = json.dumps(body(messages=[{"role": "user", "content": "x" * 65_536}])).encode()

    async def in_parts() -> AsyncIterator[bytes]:
        for start in range(0, len(raw), 8_192):
            yield raw[start : start + 8_192]

    error_of(await gateway.http.post(URL, content=raw), 413, "request_too_large")
    error_of(await gateway.http.post(URL, content=in_parts()), 413, "request_too_large")
    just_fits = json.dumps(body(messages=[{"role": "user", "content": "x" * 65_000}])).encode()
    assert (await gateway.http.post(URL, content=just_fits)).status_code == 200


async def test_frameworks_own_errors_have_the_apis_shape(gateway: Gateway) -> None:
    error_of(await gateway.http.get("/v1/nothing"), 404, "not_found")
    error_of(await gateway.http.get("/static/nothing.js"), 404, "not_found")
    wrong = await gateway.http.delete(URL)
    error_of(wrong, 405, "method_not_allowed")
    assert wrong.headers["allow"] == "GET, POST"


@pytest.mark.parametrize("header", ["", "Bearer", "Basic eDp5", "Bearer sk-wrong", "Bearer ä"])
async def test_wrong_keys_are_401(gateway: Gateway, header: str) -> None:
    response = await gateway.http.post(
        URL, json=body(), headers={"Authorization": header.encode("latin-1")}
    )
    error = error_of(response, 401, "invalid_api_key")
    assert error["type"] == "authentication_error"
    assert response.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("stream", [False, True])
async def test_j7_a_full_queue_is_429_with_retry_after(
    gateway: Gateway, redis_url: str, stream: bool
) -> None:
    import redis.asyncio as redis

    client = redis.Redis.from_url(redis_url)
    await client.hset(DEPTH_KEY, "interactive", "5000")
    await client.aclose()
    response = await gateway.http.post(URL, json=body(stream=stream))
    error_of(response, 429, "queue_full")
    assert int(response.headers["retry-after"]) > 0
    assert not gateway.double.records


async def test_b10_null_everywhere_works_to_the_end(gateway: Gateway) -> None:
    nulls = dict.fromkeys(("n", "temperature", "stop", "tools", "user", "max_tokens", "stream_options"))
    for stream in (False, True):
        response = await gateway.http.post(URL, json=body(**nulls, stream=stream))
        assert response.status_code == 200
        assert "error" not in response.text


async def test_health_and_page(gateway: Gateway) -> None:
    assert (await gateway.http.get("/healthz")).json() == {"status": "ok"}

    async def ready() -> bool:
        answer = await gateway.http.get("/readyz")
        assert (answer.status_code == 200) is answer.json()["ready"]
        return bool(answer.json()["ready"])

    await eventually(ready, "the gateway is ready")
    page = await gateway.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["cache-control"] == "no-cache"
    assert page.headers["content-security-policy"].startswith("default-src 'self'; connect-src 'self'")
    app = await gateway.http.get("/static/app.js")
    assert app.headers["content-type"].startswith("text/javascript")
    assert "content-security-policy" in app.headers
    config = (await gateway.http.get("/chat/config.json", headers={"Host": "chat.example:9"})).json()
    assert config == {"ws_url": "ws://chat.example:0/v1/ws", "model": "default"}
    odd = (await gateway.http.get("/chat/config.json", headers={"Host": 'x"y'})).json()
    assert odd["ws_url"].startswith("ws://127.0.0.1:")


async def test_no_cors_headers_unless_asked_for(gateway: Gateway) -> None:
    response = await gateway.http.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\nX: ", b"GET /"])
async def test_endless_headers_are_cut_off(gateway: Gateway, first: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.role.port)
    fine = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    for _ in range(3):
        writer.write(fine)
        await reader.readuntil(b'{"status":"ok"}')
    writer.write(first)
    answering = asyncio.create_task(reader.readexactly(12))
    for _ in range(0, 4 * MAX_HEAD_BYTES, 4_096):
        writer.write(b"x" * 4_096)
        done, _ = await asyncio.wait({answering}, timeout=0.02)
        if done:
            break
    assert await asyncio.wait_for(answering, 5) == b"HTTP/1.1 431"
    writer.close()


@pytest.mark.parametrize(
    "first", [b"\x16\x03\x01\x02\x00\x01\x00\x01", b"GET / HTTP/1.1\r\nno header\r\n\r\n", b"{}\n\n"]
)
async def test_what_is_no_http_is_refused_in_the_api_s_shape(gateway: Gateway, first: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.role.port)
    writer.write(first)
    head, _, answer = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert f"content-length: {len(answer)}".encode() in head
    assert json.loads(answer)["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("model", ["HEADRACE-SIM", " default ", "Default", "builtin:sim", "nope"])
async def test_n7_a_name_is_exact_and_the_engines_own_is_none(gateway: Gateway, model: str) -> None:
    error = error_of(await gateway.http.post(URL, json=body(model=model)), 404, "model_not_found")
    assert error["param"] == "model"
    assert not gateway.double.records


async def test_n10_a_text_in_the_place_of_a_model_is_not_repeated_anywhere(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "my secret diary\n" * 128
    with caplog.at_level("DEBUG"):
        response = await gateway.http.post(URL, json=body(model=secret))
    assert response.status_code in (400, 404)
    assert error_of(response, response.status_code, response.json()["error"]["code"])["param"] == "model"
    told = response.text + caplog.text + "".join(str(r.__dict__) for r in caplog.records)
    assert "diary" not in told + generate_latest().decode()
