"""The websocket itself: who gets in, what is refused, what a bad or slow client costs, how it closes."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
from collections.abc import AsyncIterator
from itertools import count

import httpx
import psutil
import pytest
from prometheus_client import REGISTRY
from websockets.asyncio.client import connect as ws_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from streaming_edge.close_codes import CloseCase
from tests.edge_kit import Client, EdgeRig, edge_rig, eventually


@pytest.fixture
async def rig(redis_url: str) -> AsyncIterator[EdgeRig]:
    async with edge_rig(redis_url) as found:
        yield found


async def test_auth_by_frame_or_by_header(rig: EdgeRig) -> None:
    rid = await rig.whole(["x"])
    async with rig.client(None) as client:
        await client.subscribe(rid)
        assert await client.error() == "not_authenticated"
        await client.send("auth", api_key="sk-me")
        await client.subscribe(rid)
        assert (await client.text_to())[0] == "x"
    async with rig.client("sk-me") as client:
        await client.send("auth", api_key="sk-me")
        assert await client.pong() == []


async def test_a_wrong_key_is_refused_either_way(rig: EdgeRig) -> None:
    async with rig.client(None) as client:
        await client.send("auth", api_key="sk-wrong")
        assert await client.error() == "invalid_api_key"
        assert await client.closed() == CloseCase.INVALID_API_KEY.value.code
    for authorization in ("Bearer sk-wrong", "Basic abc", "Bearer "):
        with pytest.raises(InvalidStatus) as refused:
            await ws_connect(rig.url, additional_headers={"Authorization": authorization})
        assert refused.value.response.status_code == 401
        assert json.loads(refused.value.response.body)["error"]["code"] == "invalid_api_key"


async def test_a_socket_that_does_not_authenticate_is_closed(redis_url: str) -> None:
    async with (
        edge_rig(redis_url, edge={"auth_timeout_seconds": 0.2}) as rig,
        rig.client(None) as client,
        rig.client() as authenticated,
    ):
        assert await client.closed() == CloseCase.AUTH_TIMEOUT.value.code
        assert await authenticated.pong() == []


async def test_only_the_websocket_path_and_the_health_check_exist(rig: EdgeRig) -> None:
    base = f"http://127.0.0.1:{rig.server.port}"
    async with httpx.AsyncClient(base_url=base) as http:
        assert (await http.get("/healthz")).status_code == 200
        missing = await http.get("/v1/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        assert (await http.get("/v1/ws")).status_code == 426
    with pytest.raises(InvalidStatus) as refused:
        await ws_connect(rig.url + "/x")
    assert refused.value.response.status_code == 404


async def test_origins_are_checked(redis_url: str) -> None:
    allowed = ["https://chat.example"]
    async with edge_rig(redis_url, edge={"allowed_origins": allowed}) as rig:
        async with rig.client(origin="https://chat.example") as client:
            assert await client.pong() == []
        with pytest.raises(InvalidStatus) as refused:
            await ws_connect(rig.url, origin="https://evil.example")
        assert refused.value.response.status_code == 403


async def test_a_full_server_says_so(redis_url: str) -> None:
    async with edge_rig(redis_url, edge={"max_sockets": 1}) as rig, rig.client() as client:
        assert await client.pong() == []
        with pytest.raises(InvalidStatus) as refused:
            await ws_connect(rig.url)
        assert refused.value.response.status_code == 503
        assert rig.server.not_ready() == "full"


async def test_a_large_frame_is_refused_by_name_and_a_huge_one_closes_f4(redis_url: str) -> None:
    limit = 64 * 1024
    async with edge_rig(redis_url, http={"max_body_bytes": limit}) as rig, rig.client() as client:
        await client.send("chat.create", body={"messages": ["x" * (limit - 100)]})
        assert (await client.recv())["type"] == "chat.accepted"
        await client.recv()
        await client.send("chat.create", body={"messages": ["x" * (limit + 1024)]})
        assert await client.error() == "request_too_large"
        assert await client.pong() == []
        await client.send("chat.create", body={"messages": ["x" * (limit * 5)]})
        assert await client.closed() == CloseCase.FRAME_TOO_BIG.value.code


async def test_garbage_is_answered_and_the_socket_lives(rig: EdgeRig) -> None:
    async with rig.client() as client:
        for raw in (
            "{",
            "[]",
            "7",
            b"\xff\x00",
            '{"type":"x"}',
            '{"type":"chat.create","body":"\\ud83d"}',
        ):
            await client.connection.send(raw)
            assert await client.error() == "invalid_frame"
        assert await client.pong() == []
        await client.connection.send(b"\xff", text=True)
        assert await client.closed() == CloseCase.NOT_UTF8.value.code


async def until_closed(client: Client) -> AsyncIterator[str | bytes]:
    try:
        async for raw in client.connection:
            yield raw
    except ConnectionClosed:
        return


async def test_too_many_frames_close_the_socket(redis_url: str) -> None:
    async with edge_rig(redis_url, edge={"frames_per_second": 1.0}) as rig, rig.client() as client:
        for _ in range(10):
            await client.send("ping")
        frames = [json.loads(raw) async for raw in until_closed(client)]
        assert frames[-1]["error"]["code"] == "rate_limited"
        assert client.connection.close_code == CloseCase.TOO_MANY_FRAMES.value.code


async def test_streams_per_socket_are_bounded(redis_url: str) -> None:
    async with edge_rig(redis_url, edge={"max_streams_per_socket": 2}) as rig, rig.client() as client:
        rids = [await rig.opened() for _ in range(3)]
        for rid in rids[:2]:
            await client.subscribe(rid)
            assert (await client.recv())["request_id"] == rid
        await client.subscribe(rids[2])
        assert await client.error() == "too_many_streams"
        await rig.finish(rids[0])
        assert (await client.recv())["type"] == "stream.end"
        await client.subscribe(rids[2])
        assert (await client.recv())["request_id"] == rids[2]


class DeafSocket:
    """A websocket client that subscribes and then never reads a byte."""

    def __init__(self, port: int, request_id: str) -> None:
        self._raw = socket.socket()
        self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._raw.connect(("127.0.0.1", port))
        head = (
            "GET /v1/ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
            "Authorization: Bearer sk-me\r\n\r\n"
        )
        body = json.dumps({"type": "stream.subscribe", "request_id": request_id}).encode()
        # A masked text frame with a mask of zeros.
        self._raw.sendall(head.encode() + bytes([0x81, 0x80 | len(body), 0, 0, 0, 0]) + body)

    def close(self) -> None:
        self._raw.close()


async def test_clients_that_never_read_cost_little_and_slow_nobody_f1(redis_url: str) -> None:
    """Fifty of them, each on an answer of 12 MB; one that reads is served whole meanwhile."""
    edge = {"send_timeout_seconds": 60.0, "buffer_entries": 64}
    async with edge_rig(redis_url, edge=edge) as rig:
        rid = await rig.opened()
        deaf = [DeafSocket(rig.server.port, rid) for _ in range(50)]
        try:
            await eventually(lambda: REGISTRY.get_sample_value("headrace_readers") == 50.0)
            gc.collect()
            before = psutil.Process().memory_info().rss
            piece = "x" * 2_000
            async with rig.client() as client:
                await client.subscribe(rid, "0-1")
                for n in range(1, 6_001, 100):
                    await rig.write(rid, [piece] * 100, first=n)
                    words, _, _ = await client.text_to(100)
                    assert len(words) == 200_000
                await rig.finish(rid)
                assert (await client.text_to())[2] is not None
            gc.collect()
            grown = psutil.Process().memory_info().rss - before
            assert grown < 50 * 1_000_000, "far less than 50 answers of 12 MB"
            for feed in rig.hub._feeds.values():
                assert all(reader.state.buffered <= 64 for reader in feed.readers)
        finally:
            for one in deaf:
                one.close()
        await eventually(lambda: REGISTRY.get_sample_value("headrace_readers") == 0.0)


async def test_a_client_that_takes_nothing_for_too_long_is_closed_f1(redis_url: str) -> None:
    async with edge_rig(redis_url, edge={"send_timeout_seconds": 0.3}) as rig:
        rid = await rig.opened()
        await rig.write(rid, ["x" * 10_000] * 1_000)
        deaf = DeafSocket(rig.server.port, rid)
        try:
            await eventually(lambda: REGISTRY.get_sample_value("headrace_sockets") == 1.0)
            await eventually(lambda: REGISTRY.get_sample_value("headrace_sockets") == 0.0)
            assert REGISTRY.get_sample_value("headrace_readers") == 0.0
        finally:
            deaf.close()


async def test_disconnects_at_any_moment_are_normal_f5(
    rig: EdgeRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rid = await rig.opened()
    tokens = count(1)
    for number in range(30):
        async with rig.client() as client:
            await client.subscribe(rid)
            await client.send("chat.create", body={"messages": ["x"]})
            await rig.write(rid, ["x"], first=next(tokens))
            if number % 3 == 0:
                client.connection.transport.abort()
            elif number % 3 == 1:
                closing = asyncio.ensure_future(client.connection.close())
                await rig.write(rid, ["y"], first=next(tokens))
                await closing
    await eventually(lambda: REGISTRY.get_sample_value("headrace_sockets") == 0.0)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []
    ours = [r for r in caplog.records if r.name.startswith("streaming_edge")]
    assert [r.getMessage() for r in ours] == ["socket closed"] * 30
    assert rig.hub._feeds == {}


async def test_a_drain_closes_with_reconnect_and_the_rest_comes_from_another_edge_q1(
    redis_url: str,
) -> None:
    async with edge_rig(redis_url) as first, edge_rig(redis_url) as second:
        rid = await first.opened()
        await first.write(rid, ["a", "b"])
        first.intake.gate.clear()
        async with first.client() as client:
            await client.subscribe(rid, "0-1")
            words, after, _ = await client.text_to(2)
            await client.send("chat.create", ref="late", body={"messages": ["x"]})
            assert await client.pong() == []
            draining = asyncio.ensure_future(first.server.drain(5.0))
            await eventually(lambda: first.server.not_ready() is not None)
            await client.send("chat.create", ref="too late", body={"messages": ["x"]})
            assert await client.pong() == [], "left to the next server"
            first.intake.gate.set()
            assert (await client.recv())["ref"] == "late", "what was asked for before is accepted"
            assert await client.closed() == CloseCase.RESTART.value.code
            await draining
        await second.write(rid, ["c"], first=3)
        await second.finish(rid)
        async with second.client() as client:
            await client.subscribe(rid, after)
            assert words + (await client.text_to())[0] == "abc"


async def test_a_redis_outage_is_survived_by_open_sockets(rig: EdgeRig) -> None:
    rid = await rig.opened()
    async with rig.client() as client:
        await client.subscribe(rid, "0-1")
        assert await client.pong() == []
        for connection in await rig.redis.client_list():
            if connection["cmd"].lower().startswith("xread"):
                await rig.redis.client_kill(connection["addr"])
        await rig.write(rid, ["x"])
        await rig.finish(rid)
        assert (await client.text_to())[0] == "x"
