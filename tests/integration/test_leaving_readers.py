"""Readers that leave a whole stack: the work ends everywhere, and only when the last one has gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect as ws_connect

from contracts.reply import Reply
from contracts.tiers import Status
from infra.settings import RedisSettings, StreamSettings
from infra.stream_redis import RedisTokenStreams, connect
from tests.integration.worker_bench import eventually
from tests.stack_process import PAID_KEY, StackProcess

URL = "/v1/chat/completions"
HEADERS = {"Authorization": f"Bearer {PAID_KEY}"}

pytestmark = pytest.mark.timeout(120)


class Rig:
    def __init__(self, stack: StackProcess, http: httpx.AsyncClient, streams: RedisTokenStreams) -> None:
        self.stack = stack
        self.http = http
        self.streams = streams

    def body(self, *, grace: float | None, tokens: int = 5_000, **fields: Any) -> dict[str, Any]:
        return {
            "model": "default",
            "messages": [{"role": "user", "content": "go on and on"}],
            "stream": True,
            "max_tokens": tokens,
            "leave_grace_seconds": grace,
            **fields,
        }

    async def read(self, response: httpx.Response, texts: int | None) -> tuple[str, str | None]:
        """Text and last offset of up to ``texts`` chunks with text."""
        text, offset, seen = "", None, 0
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                offset = line[4:]
            if line.startswith("data: {"):
                piece = "".join(c["delta"].get("content") or "" for c in json.loads(line[6:])["choices"])
                text += piece
                seen += bool(piece)
                if seen == texts:
                    break
        return text, offset

    async def reply(self, rid: str) -> Reply:
        return Reply().extend(await self.streams.read_all(rid))

    async def ended(self, rid: str, seconds: float = 15.0) -> Reply:
        async def sealed() -> Reply | None:
            reply = await self.reply(rid)
            return reply if reply.terminal is not None else None

        found: Reply = await eventually(sealed, f"the seal of {rid}", seconds)
        return found

    async def running(self) -> float:
        """What the worker says it generates."""
        port = self.stack.process_state("worker").port
        async with httpx.AsyncClient() as http:
            lines = (await http.get(f"http://127.0.0.1:{port}/metrics")).text.splitlines()
        return float(next(x for x in lines if x.startswith("headrace_running ")).split()[1])

    async def idle(self) -> bool:
        return await self.running() == 0


@asynccontextmanager
async def rig_on(stack: StackProcess) -> AsyncIterator[Rig]:
    await asyncio.to_thread(stack.wait_ready)
    client = connect(RedisSettings(url=stack.state().redis))
    try:
        async with httpx.AsyncClient(base_url=stack.url, headers=HEADERS, timeout=30) as http:
            yield Rig(stack, http, RedisTokenStreams(client, StreamSettings()))
    finally:
        await client.aclose()


@pytest.fixture
async def rig(sim_stack: StackProcess) -> AsyncIterator[Rig]:
    async with rig_on(sim_stack) as found:
        yield found


@pytest.fixture
async def own_rig(data_dir: Path) -> AsyncIterator[Rig]:
    """On a stack whose processes may be killed."""
    with StackProcess(data_dir, "--engine", "sim") as stack:
        async with rig_on(stack) as found:
            yield found


async def test_d1_closing_after_three_tokens_ends_the_work_twenty_times_in_a_row(rig: Rig) -> None:
    for _ in range(20):
        async with rig.http.stream("POST", URL, json=rig.body(grace=0)) as response:
            assert response.status_code == 200
            rid = response.headers["x-request-id"]
            await rig.read(response, 3)
        reply = await rig.ended(rid)
        assert reply.terminal is not None
        assert reply.terminal.status is Status.CANCELLED
        assert 3 <= reply.tokens_out < 2_000
    await eventually(rig.idle, "nothing runs any more")


async def test_d4_closing_a_call_with_four_choices_ends_all_of_them(rig: Rig) -> None:
    body = rig.body(grace=0, tokens=1_500, n=4)
    async with rig.http.stream("POST", URL, json=body) as response:
        rid = response.headers["x-request-id"]
        await rig.read(response, 1)
    assert (await rig.ended(rid)).terminal.status is Status.CANCELLED  # type: ignore[union-attr]
    await eventually(rig.idle, "nothing runs any more")


async def test_d1_a_call_that_does_not_stream_ends_with_its_client(rig: Rig) -> None:
    client = connect(RedisSettings(url=rig.stack.state().redis))
    try:
        before = set(await client.zrange("hr:open", 0, -1))
        body = rig.body(grace=0) | {"stream": False}
        calling = asyncio.create_task(rig.http.post(URL, json=body))

        async def accepted() -> str | None:
            new = set(await client.zrange("hr:open", 0, -1)) - before
            return new.pop().decode() if new else None

        rid = await eventually(accepted, "the request is accepted")

        async def speaking() -> bool:
            return (await rig.reply(rid)).tokens_out > 3

        await eventually(speaking, "it runs")
        calling.cancel()
        reply = await rig.ended(rid)
    finally:
        await client.aclose()
    assert reply.terminal is not None
    assert reply.terminal.status is Status.CANCELLED
    assert reply.tokens_out < 3_000


async def test_e8_with_two_readers_one_may_leave_and_the_other_reads_to_the_end(rig: Rig) -> None:
    body = rig.body(grace=0, tokens=400)
    async with ws_connect(rig.stack.ws_url, additional_headers=HEADERS) as socket:
        async with rig.http.stream("POST", URL, json=body) as response:
            rid = response.headers["x-request-id"]
            await socket.send(json.dumps({"type": "stream.subscribe", "request_id": rid, "after": None}))
            text = ""
            while not text:
                text += json.loads(await socket.recv()).get("text", "")
            await rig.read(response, 20)
        while (frame := json.loads(await socket.recv()))["type"] != "stream.end":
            text += frame.get("text", "")
    assert frame["status"] == "completed"
    assert text == (await rig.reply(rid)).choices[0].text


async def test_d1_coming_back_within_the_grace_time_gives_exactly_the_rest(rig: Rig) -> None:
    async with rig.http.stream("POST", URL, json=rig.body(grace=20, tokens=300)) as response:
        rid = response.headers["x-request-id"]
        first, offset = await rig.read(response, 5)
    assert offset is not None
    resumed = {"Last-Event-ID": offset}
    async with rig.http.stream("GET", f"{URL}/{rid}?stream=true", headers=resumed) as response:
        rest, _ = await rig.read(response, None)
    reply = await rig.reply(rid)
    assert reply.terminal is not None
    assert reply.terminal.status is Status.COMPLETED
    assert first + rest == reply.choices[0].text


async def test_d5_a_call_whose_client_leaves_the_queue_never_reaches_a_worker(rig: Rig) -> None:
    worker = rig.stack.process_state("worker").pid
    assert worker is not None
    os.kill(worker, signal.SIGSTOP)
    try:
        # The scheduler counts the frozen worker as alive for a while: what it gives it meanwhile is not
        # started, and its client has left before anybody else can.
        async with ws_connect(rig.stack.ws_url, additional_headers=HEADERS) as socket:
            body = rig.body(grace=0)
            await socket.send(json.dumps({"type": "chat.create", "ref": "r", "body": body}))
            while (frame := json.loads(await socket.recv()))["type"] != "chat.accepted":
                pass
            rid = frame["request_id"]
        reply = await rig.ended(rid, 30)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert reply.terminal is not None
    assert reply.terminal.status is Status.CANCELLED
    assert reply.attempts == 0
    await eventually(rig.idle, "nothing runs")
    assert (await rig.reply(rid)).attempts == 0


async def test_d1_i5_readers_of_a_gateway_that_is_killed_are_missed_too(own_rig: Rig) -> None:
    gateway = own_rig.stack.process_state("gateway").pid
    assert gateway is not None
    async with own_rig.http.stream("POST", URL, json=own_rig.body(grace=1)) as response:
        rid = response.headers["x-request-id"]
        await own_rig.read(response, 1)
        os.kill(gateway, signal.SIGKILL)
        # Its hub can no longer say that its readers left: nobody vouches for them any more.
        reply = await own_rig.ended(rid, 20)
    assert reply.terminal is not None
    assert reply.terminal.status is Status.CANCELLED
    await eventually(own_rig.idle, "nothing runs any more")
