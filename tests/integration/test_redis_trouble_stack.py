"""A whole stack on a Redis of its own that is filled, restarted and forgets its scripts under load."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from contracts.reply import Reply
from infra.settings import DEV_PAID_KEY, RedisSettings, StreamSettings
from infra.stream_redis import RedisTokenStreams, connect
from tests.integration.test_redis_full import full
from tests.integration.worker_bench import eventually
from tests.redis_servers import RedisServer, restartable
from tests.stack_process import StackProcess
from tests.tcp_proxy import tcp_proxy

pytestmark = pytest.mark.timeout(150)

URL = "/v1/chat/completions"
HEADERS = {"Authorization": f"Bearer {DEV_PAID_KEY}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("trouble")
    with restartable("valkey", folder, {"maxmemory": "16mb"}) as found:
        yield found


@pytest.fixture(scope="module")
def stack(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackProcess]:
    data_dir: Path = tmp_path_factory.mktemp("stack") / "data"
    with StackProcess(data_dir, "--engine", "sim", "--redis", server.url) as found:
        found.wait_ready(60)
        yield found


class Rig:
    def __init__(self, stack: StackProcess, server: RedisServer, http: httpx.AsyncClient) -> None:
        self.stack = stack
        self.server = server
        self.http = http
        self.client: Any = connect(RedisSettings(url=server.url))
        self.streams = RedisTokenStreams(self.client, StreamSettings())

    async def ask(self, text: str, tokens: int = 20) -> httpx.Response:
        return await self.http.post(URL, json=body(text, tokens))

    async def asked(self, text: str, seconds: float = 20.0) -> None:
        """A new request is answered, within the time given for everything to find its feet again."""

        async def answered() -> bool:
            return (await self.ask(text)).status_code == 200

        await eventually(answered, "a new request is answered", seconds)

    async def ended(self, rid: str, seconds: float = 30.0) -> Reply:
        async def sealed() -> Reply | None:
            reply = Reply().extend(await self.streams.read_all(rid))
            return reply if reply.terminal is not None else None

        found: Reply = await eventually(sealed, f"the seal of {rid}", seconds)
        return found

    async def streamed(self, text: str, tokens: int) -> tuple[str, str | None]:
        """The text of a streamed reply, and the code of the error it ended with."""
        words = ""
        async with self.http.stream("POST", URL, json=body(text, tokens, stream=True)) as response:
            if response.status_code != 200:
                await response.aread()
                return "", json.loads(response.text)["error"]["code"]
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return words, None
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return words, event["error"]["code"]
                    words += event["choices"][0]["delta"].get("content") or ""
        return words, "cut"


def body(text: str, tokens: int, stream: bool = False) -> dict[str, Any]:
    return {
        "model": "default",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "stream": stream,
    }


@asynccontextmanager
async def rig_on(stack: StackProcess, server: RedisServer) -> AsyncIterator[Rig]:
    async with httpx.AsyncClient(base_url=stack.url, headers=HEADERS, timeout=60) as http:
        rig = Rig(stack, server, http)
        try:
            yield rig
        finally:
            await rig.client.aclose()


@pytest.fixture
async def rig(stack: StackProcess, server: RedisServer) -> AsyncIterator[Rig]:
    async with rig_on(stack, server) as found:
        await found.asked("ready?")
        yield found


async def test_h8_a_full_redis_refuses_calls_with_503_and_takes_them_again(rig: Rig) -> None:
    running = asyncio.create_task(rig.streamed("long", 5_000))

    async def started() -> bool:
        rids = await rig.client.zrange("hr:open", 0, -1)
        replies = [Reply().extend(await rig.streams.read_all(rid.decode())) for rid in rids]
        return any(reply.tokens_out > 5 for reply in replies)

    await eventually(started, "a reply that runs")
    early = [asyncio.create_task(rig.ask(f"early {n}", 5)) for n in range(8)]
    async with full(rig.client):
        # Some bytes become free now and then, so one of them may slip in and have to wait for more.
        keyed = rig.http.post(URL, json=body("no room", 5), headers={"Idempotency-Key": "k1"})
        calls = [
            asyncio.create_task(c) for c in (keyed, *(rig.ask(f"no room {n}", 5) for n in range(3)))
        ]
        done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        refused = done.pop().result()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "service_unavailable"
        early += [*done, *waiting]
        async with asyncio.timeout(30):
            _, code = await running
        assert code == "request_lost"
    await rig.asked("after")
    async with asyncio.timeout(30):
        answers = await asyncio.gather(*early)
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert all(r.restarts == 0 for r in rig.stack.state().roles)


async def test_h5_forgotten_scripts_and_h10_three_restarts_lose_no_reply(rig: Rig) -> None:
    texts = {n: (await rig.ask(f"reply {n}", 250)).json() for n in range(4)}
    expected = {n: t["choices"][0]["message"]["content"] for n, t in texts.items()}
    tasks = {}
    began = time.monotonic()
    for round_ in range(3):
        tasks |= {(round_, n): asyncio.create_task(rig.streamed(f"reply {n}", 250)) for n in expected}
        await asyncio.sleep(0.7)
        await rig.client.script_flush()
        await asyncio.to_thread(rig.server.stop)
        await asyncio.to_thread(rig.server.start)
        await rig.asked(f"between {round_}")
    assert time.monotonic() - began < 60
    for (_, n), task in tasks.items():
        words, code = await task
        assert code in (None, "service_unavailable", "request_lost")
        assert words == expected[n] if code is None else expected[n].startswith(words)
    assert sum(task.result()[1] is None for task in tasks.values()) >= 9
    assert all(r.restarts == 0 for r in rig.stack.state().roles)


async def test_h7_every_key_of_a_request_goes_away_with_its_time(rig: Rig) -> None:
    """Also of those that were never sealed: the time to live is there from the first entry on."""
    for n in range(30):
        assert (await rig.ask(f"key {n}", 2)).status_code == 200
    names = [name async for name in rig.client.scan_iter("hr:{*", count=1_000)]
    assert [name for name in names if await rig.client.ttl(name) < 0] == []

    async def none_open() -> bool:
        return not await rig.client.zcard("hr:open")

    await eventually(none_open, "no request is open")


async def test_every_role_follows_its_redis_to_a_promoted_replica(tmp_path: Path) -> None:
    """A stable address, the primary killed behind it: replies go on, new ones work, nothing restarts."""
    for name in ("primary", "replica"):
        (tmp_path / name).mkdir()
    with (
        restartable("valkey", tmp_path / "primary") as primary,
        restartable("valkey", tmp_path / "replica") as replica,
    ):
        follower: Any = connect(RedisSettings(url=replica.url))
        await follower.execute_command("REPLICAOF", "127.0.0.1", primary.port)
        async with tcp_proxy(primary.port) as proxy:
            with StackProcess(tmp_path / "data", "--engine", "sim", "--redis", proxy.url) as stack:
                await asyncio.to_thread(stack.wait_ready, 60)
                async with rig_on(stack, replica) as rig:
                    await rig.asked("ready?")
                    answer = (await rig.ask("follow", 250)).json()
                    expected = answer["choices"][0]["message"]["content"]
                    tasks = [asyncio.create_task(rig.streamed("follow", 250)) for _ in range(4)]
                    await asyncio.sleep(1.0)
                    primary.kill()
                    await follower.execute_command("REPLICAOF", "NO", "ONE")
                    proxy.target = replica.port
                    await rig.asked("after", 10.0)
                    async with asyncio.timeout(30):
                        found = await asyncio.gather(*tasks)
                    assert found == [(expected, None)] * 4
                    assert all(r.restarts == 0 for r in stack.state().roles)
        await follower.aclose()
