"""Gateways and history while the limits' Redis is away, and the line of a tier."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from contracts.identity import make_request_id
from contracts.limits import RateLimits
from contracts.records import Message, OutcomeChoice, OutcomeRecord
from contracts.tiers import Status
from contracts.token_stream import StreamsUnavailable
from infra.conversations_redis import Conversations
from infra.limits_redis import LimitCounters, LimitReached, LimitScope
from infra.pipeline_health import DEPTH_KEY
from infra.settings import DEV_FREE_KEY, DEV_PAID_KEY, LimitSettings, RedisSettings, Settings
from infra.stream_redis import connect
from infra.topics import ensure_topics
from stages.faust_app import WINDOW
from stages.history_faust import HistoryRole
from tests.integration.gateway_fixture import Gateway, eventually, running_gateway
from tests.integration.pipeline_double import script
from tests.redis_servers import RedisServer, restartable

from .stage_bench import Bench, now_ms, running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with restartable("valkey", tmp_path) as made:
        yield made


def limited(settings: Settings, limits_url: str | None = None, **tiers: dict[str, Any]) -> Settings:
    raw = settings.model_dump(mode="json")
    raw["limits"] |= {"redis_url": limits_url, "timeout_seconds": 0.5}
    for name, changes in tiers.items():
        raw["tiers"][name] |= changes
    return Settings.model_validate(raw)


async def ask(gateway: Gateway, key: str) -> httpx.Response:
    body = {"model": "default", "messages": script(tokens=["a"])}
    headers = {"Authorization": f"Bearer {key}"}
    return await gateway.http.post("/v1/chat/completions", json=body, headers=headers)


async def test_without_counters_free_users_are_refused_and_paid_ones_bounded(
    settings: Callable[..., Settings], server: RedisServer
) -> None:
    limits = {"limits": {"requests_per_minute": 100}}
    paid = {"when_limits_unavailable": "open", "open_requests_per_minute": 2}
    made = limited(settings(), server.url, paid=limits | paid, free=limits)
    async with running_gateway(made) as gateway:
        counted = await ask(gateway, DEV_PAID_KEY)
        assert counted.headers["x-ratelimit-remaining-requests"] == "99"
        server.kill()
        answers = [await ask(gateway, DEV_PAID_KEY) for _ in range(3)]
        assert [a.status_code for a in answers] == [200, 200, 429]
        assert "x-ratelimit-limit-requests" not in answers[0].headers
        assert int(answers[2].headers["retry-after"]) >= 1
        closed = await ask(gateway, DEV_FREE_KEY)
        assert (closed.status_code, closed.headers["retry-after"]) == (503, "1")
        server.start()

        async def counts_again() -> bool:
            return "x-ratelimit-limit-requests" in (await ask(gateway, DEV_FREE_KEY)).headers

        await eventually(counts_again, "limits are counted again")


async def test_history_goes_on_while_limits_cannot_be_settled(
    settings: Callable[..., Settings], server: RedisServer
) -> None:
    made = limited(settings(), server.url, paid={"limits": {"requests_per_minute": 100}})
    await ensure_topics(made)
    async with Bench(made) as bench, running(HistoryRole(made)):
        server.kill()
        conversations = Conversations(bench.redis, made.history)
        for number in range(2 * WINDOW):
            outcome = ended(f"c{number}")
            await bench.publisher.send(bench.topics.outcomes, outcome.encode(), key=outcome.request_id)

        async def all_stored() -> bool:
            found = [(await conversations.load("t", f"c{n}"))[0] for n in range(2 * WINDOW)]
            return all(found)

        await eventually(all_stored, "every turn is stored")


def ended(conversation_id: str) -> OutcomeRecord:
    return OutcomeRecord(
        request_id=make_request_id(now_ms(), os.urandom(10)),
        tenant="t",
        key_id="dev",
        tier="paid",
        model="m",
        conversation_id=conversation_id,
        created_ms=now_ms(),
        finished_ms=now_ms(),
        turn=[Message(role="user", content="hello")],
        status=Status.COMPLETED,
        choices=[OutcomeChoice(index=0, text="hi")],
    )


class Permits:
    """Requests that take one of a few permits, hold it, and end, whatever becomes of Redis meanwhile."""

    def __init__(self, client: Any, permits: int) -> None:
        self.permits = permits
        self.ended: list[str] = []
        self._counters = LimitCounters(client, 2.0)
        self._scope = LimitScope("key:a", LimitSettings(concurrent=permits))
        self._holding: set[str] = set()

    async def take(self, request_id: str, ended: tuple[str, ...]) -> RateLimits | LimitReached:
        while True:
            try:
                return await self._counters.take(request_id, [self._scope], 1, 60_000, ended)
            except StreamsUnavailable:
                await asyncio.sleep(0.05)

    async def request(self) -> None:
        request_id = make_request_id(now_ms(), os.urandom(10))
        ended: tuple[str, ...] = ()
        while isinstance(found := await self.take(request_id, ended), LimitReached):
            ended = tuple(r for r in found.held if r in self.ended)
            await asyncio.sleep(0.005)
        self._holding.add(request_id)
        assert len(self._holding) <= self.permits
        await asyncio.sleep(0.005)
        self._holding.remove(request_id)
        self.ended.append(request_id)

    async def free(self) -> int:
        """How many permits can be had; they are kept."""
        count = 0
        while isinstance(await self.take(f"last-{count}", tuple(self.ended)), RateLimits):
            count += 1
        return count


async def test_no_permit_is_lost_or_leaked_when_scripts_are_forgotten_and_redis_restarts_H5(
    server: RedisServer,
) -> None:
    client, own = (connect(RedisSettings(url=server.url)) for _ in range(2))
    permits = Permits(client, 4)
    load = [asyncio.ensure_future(permits.request()) for _ in range(300)]

    async def until_ended(count: int) -> None:
        async def reached() -> bool:
            return len(permits.ended) >= count

        await eventually(reached, f"{count} requests have ended", 20)

    await until_ended(10)
    await own.script_flush()
    await until_ended(50)
    await asyncio.to_thread(server.stop)
    before = len(permits.ended)
    await asyncio.to_thread(server.start)
    await until_ended(before + 50)
    await own.script_flush()
    assert len(permits.ended) < len(load), "the load outlasts the trouble"
    await asyncio.gather(*load)
    assert await permits.free() == permits.permits
    await client.aclose()
    await own.aclose()


async def test_a_tier_s_line_may_be_shorter_than_its_class_s_J7(
    settings: Callable[..., Settings],
) -> None:
    made = limited(settings(), free={"queue_limit": 3})
    async with running_gateway(made) as gateway:
        client: Any = connect(made.redis)
        await client.hset(DEPTH_KEY, mapping={"standard": 3, "interactive": 3})
        try:
            assert (await ask(gateway, DEV_PAID_KEY)).status_code == 200
            refused = await ask(gateway, DEV_FREE_KEY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
        finally:
            await client.aclose()
