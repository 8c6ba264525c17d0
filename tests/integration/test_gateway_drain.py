"""A gateway that is told to stop, and its successor on the same listening socket (Q1)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from infra.listeners import bind_listener
from infra.settings import Settings
from producers.role import GatewayRole
from tests.integration.gateway_fixture import Gateway, eventually, running_gateway
from tests.integration.pipeline_double import script

URL = "/v1/chat/completions"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with bind_listener("127.0.0.1", 0) as made:
        yield made


@asynccontextmanager
async def successor(settings: Settings, listener: socket.socket) -> AsyncIterator[None]:
    role = GatewayRole(settings, listener=listener.dup())
    await role.start()
    try:
        yield
    finally:
        await role.stop()


async def read_stream(gateway: Gateway, opened: asyncio.Event) -> tuple[str, str]:
    body = {"model": "default", "messages": script(tokens=["a"] * 5, hold_before=3), "stream": True}
    async with gateway.http.stream("POST", URL, json=body) as response:
        lines = []
        async for line in response.aiter_lines():
            lines.append(line)
            if line == "id: 1-3":
                opened.set()
        return response.headers["x-request-id"], "\n".join(lines)


async def test_q1_after_the_grace_time_readers_are_told_where_to_go_on(
    settings: Callable[..., Settings], listener: socket.socket
) -> None:
    """A stream that has begun ends with an event that names its offset; all others are redirected."""
    short = settings(drain_seconds=0.3)
    async with running_gateway(short, listener.dup()) as gateway, gateway.openai() as openai:
        opened = asyncio.Event()
        streaming = asyncio.create_task(read_stream(gateway, opened))
        whole = asyncio.create_task(
            openai.chat.completions.create(
                model="default",
                messages=script(tokens=["b", "c"], hold_before=1),  # type: ignore[arg-type]
            )
        )
        unmoderated = asyncio.create_task(
            openai.chat.completions.create(
                model="default",
                messages=script(tokens=["d"], hold_before=-1),  # type: ignore[arg-type]
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        await opened.wait()

        async def all_open() -> bool:
            return gateway.role._replies.count == 3

        await eventually(all_open, "all replies are open")
        await gateway.role.drain()
        assert await gateway.role.not_ready() == "draining"
        stopping = asyncio.create_task(gateway.role.stop())
        request_id, text = await streaming
        last = text.rstrip().rpartition("\n\n")[2]
        assert last.startswith("id: 1-3\ndata: ")
        assert '"code":"service_unavailable"' in last
        assert f"GET {URL}/{request_id}?stream=true&after=1-3" in last
        assert "[DONE]" not in text
        await stopping
        async with successor(short, listener):
            gateway.double.release()
            rest = await gateway.http.get(f"{URL}/{request_id}?stream=true&after=1-3")
            assert rest.text.count('"content":"a"') == 2
            assert rest.text.endswith("data: [DONE]\n\n")
            assert (await whole).choices[0].message.content == "bc"
            chunks = [chunk async for chunk in await unmoderated]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "d"
            assert chunks[-1].usage is not None


async def test_q1_a_reply_that_ends_within_the_grace_time_ends_well(
    settings: Callable[..., Settings],
) -> None:
    async with running_gateway(settings(drain_seconds=20)) as gateway:
        opened = asyncio.Event()
        streaming = asyncio.create_task(read_stream(gateway, opened))
        await opened.wait()
        draining = asyncio.create_task(gateway.role.drain())
        gateway.double.release()
        await draining
        assert (await streaming)[1].rstrip().endswith("data: [DONE]")


async def test_q1_a_request_on_a_kept_connection_is_served_and_new_connections_wait(
    settings: Callable[..., Settings], listener: socket.socket
) -> None:
    limits = settings(drain_seconds=20)
    async with running_gateway(limits, listener.dup()) as gateway:
        await gateway.http.get("/v1/models")  # its connection is kept
        draining = asyncio.create_task(gateway.role.drain())
        await asyncio.sleep(0)
        answer = await gateway.http.post(URL, json={"model": "default", "messages": script()})
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        late = asyncio.create_task(gateway.http.get("/v1/models"))
        await draining
        assert not late.done()
        async with successor(limits, listener):
            assert (await late).status_code == 200


async def test_q1_without_a_socket_of_others_connections_are_refused_at_once(
    settings: Callable[..., Settings],
) -> None:
    async with running_gateway(settings(drain_seconds=20)) as gateway:
        port = gateway.role.port
        waiting = await asyncio.open_connection("127.0.0.1", port)
        draining = asyncio.create_task(gateway.role.drain())
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection("127.0.0.1", port)
        # Accepted before, and its request is on its way: it is served all the same.
        waiting[1].write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await waiting[0].readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401")
        assert b"connection: close" in head.lower()
        waiting[1].close()
        await draining


async def test_q2_an_idle_connection_does_not_hold_up_the_drain(
    settings: Callable[..., Settings],
) -> None:
    async with running_gateway(settings(drain_seconds=60)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.role.port)
        async with asyncio.timeout(20):
            await gateway.role.drain()
        assert await reader.read() == b""
        writer.close()
        with pytest.raises(httpx.ConnectError):
            await gateway.http.get("/v1/models")
