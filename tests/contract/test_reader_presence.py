"""Hubs say who reads what; the answer is right with several hubs, and after one has died (D1, E8)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from contracts.absence import NOBODY, Sighting
from contracts.entries import Accepted, Terminal
from contracts.identity import make_request_id
from contracts.stream_ids import START
from contracts.tiers import Status
from infra.open_requests_redis import OPEN_KEY, OpenRequests
from infra.presence_redis import ReaderPresence, readers_key
from infra.settings import RedisSettings, StreamSettings
from infra.stream_redis import RedisTokenStreams, connect
from streaming_edge.hub import Hub


class Rig:
    def __init__(self, url: str) -> None:
        self.client: Any = connect(RedisSettings(url=url))
        self.blocking = connect(RedisSettings(url=url), blocking=True)
        self.streams = RedisTokenStreams(self.client, StreamSettings())
        self.presence = ReaderPresence(self.client)
        self.hubs: list[Hub] = []

    async def hub(self) -> Hub:
        hub = Hub(self.streams, self.blocking, 16, ReaderPresence(self.client))
        await hub.start()
        self.hubs.append(hub)
        return hub

    async def opened(self) -> str:
        rid = make_request_id(1, secrets.token_bytes(10))
        await self.streams.create(rid, Accepted(tenant="t", tier="paid", model="m", created_ms=1))
        return rid

    async def sighting(self, rid: str) -> tuple[int, Sighting]:
        now_ms, [sighting] = await self.presence.look([rid])
        return now_ms, sighting

    async def present(self, rid: str) -> bool:
        now_ms, sighting = await self.sighting(rid)
        return sighting.vouched_until_ms > now_ms

    async def left(self, rid: str) -> bool:
        _, sighting = await self.sighting(rid)
        return sighting.left_ms > 0 and sighting.vouched_until_ms == 0


async def eventually(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + 15
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


@pytest.fixture
async def rig(redis_url: str) -> AsyncIterator[Rig]:
    made = Rig(redis_url)
    yield made
    for hub in made.hubs:
        await hub.stop()
    await made.blocking.aclose()
    await made.client.aclose()


async def test_the_last_of_all_readers_leaving_is_seen_at_once_e8(rig: Rig) -> None:
    first, second = await rig.hub(), await rig.hub()
    rid = await rig.opened()
    assert (await rig.sighting(rid))[1] == NOBODY
    async with first.subscribe(rid, START):
        async with second.subscribe(rid, START), second.subscribe(rid, START):
            await eventually(lambda: rig.present(rid), "present")

            async def both() -> bool:
                return await rig.client.zcard(readers_key(rid)) == 2

            await eventually(both, "two hubs vouch")

        async def one_left() -> bool:
            return (await rig.sighting(rid))[1].left_ms > 0

        await eventually(one_left, "the second hub says so")
        assert await rig.present(rid)
    await eventually(lambda: rig.left(rid), "nobody is left")
    assert await rig.client.ttl(readers_key(rid)) > 3_600


async def test_a_hub_vouches_on_and_one_that_dies_stops(rig: Rig) -> None:
    hub = await rig.hub()
    rid = await rig.opened()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(hub.subscribe(rid, START))
        await eventually(lambda: rig.present(rid), "present")
        until = (await rig.sighting(rid))[1].vouched_until_ms

        async def renewed() -> bool:
            return (await rig.sighting(rid))[1].vouched_until_ms > until

        await eventually(renewed, "vouched anew")
        await hub.stop()

        async def lapsed() -> bool:
            return not await rig.present(rid)

        await eventually(lapsed, "a dead hub vouches for nobody")
    assert (await rig.sighting(rid))[1].left_ms == 0


async def test_readers_that_are_sent_away_have_not_left(rig: Rig) -> None:
    hub = await rig.hub()
    rid = await rig.opened()
    other = await rig.opened()
    async with hub.subscribe(rid, START):
        await eventually(lambda: rig.present(rid), "present")
        hub.sending_away = True
    hub.sending_away = False
    async with hub.subscribe(other, START):
        await eventually(lambda: rig.present(other), "a later word")
    await eventually(lambda: rig.left(other), "a later departure")
    assert (await rig.sighting(rid))[1].left_ms == 0


async def test_a_seal_takes_readers_and_index_entry_along(rig: Rig) -> None:
    hub = await rig.hub()
    rid = await rig.opened()
    assert await rig.client.zscore(OPEN_KEY, rid) == 1
    async with hub.subscribe(rid, START) as reader:
        await eventually(lambda: rig.present(rid), "present")
        await rig.streams.seal(rid, Terminal(status=Status.CANCELLED))
        while not reader.ended:
            await reader.next(5.0)
    assert await rig.client.exists(readers_key(rid)) == 0
    assert await rig.client.zscore(OPEN_KEY, rid) is None
    assert await rig.client.ttl(f"hr:{{{rid}}}:s") > 0


async def test_touches_change_only_what_is_in_the_index(rig: Rig) -> None:
    index = OpenRequests(rig.client, "p")
    one, two = await rig.opened(), await rig.opened()
    await index.touch([one, "chatcmpl-unknown"], 500)
    assert await index.untouched(400, 10) == [two]
    assert await index.untouched(500, 10) == [two, one]
    assert await index.untouched(500, 1) == [two]
    await index.drop([two])
    assert await index.untouched(500, 10) == [one]
    assert await index.topics_born_ms() == 0
    await index.topics_born(7)
    assert await index.topics_born_ms() == 7


async def test_a_repeated_create_changes_nothing(rig: Rig) -> None:
    rid = await rig.opened()
    await rig.streams.create(rid, Accepted(tenant="t", tier="paid", model="m", created_ms=1))
    assert len(await rig.streams.read_all(rid)) == 1
