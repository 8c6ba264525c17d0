"""Reservations are settled by outcomes, and where none comes, by the token streams (J2, J11)."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.entries import Accepted, Moderated, Terminal, Text
from contracts.identity import make_request_id
from contracts.outcome import outcome_of_stream
from contracts.reply import Reply
from contracts.stream_ids import MODERATED, StreamId
from contracts.tiers import Status
from contracts.token_stream import StreamsUnavailable
from infra.limits_redis import LimitCounters, LimitReached, LimitScope
from infra.settings import LimitSettings, RedisSettings, Settings
from infra.stream_redis import RedisTokenStreams, connect
from stages.reservations import Reservations
from tests.attempts import start_attempt
from tests.redis_servers import RedisServer, restartable

EVERYTHING = LimitSettings(
    requests_per_minute=10,
    tokens_per_minute=1_000,
    concurrent=10,
    requests_per_day=10,
    tokens_per_day=1_000,
    enqueued_tokens=1_000,
)
RESERVED = 100


class Rig:
    def __init__(self, settings: Settings) -> None:
        self.client: Any = connect(settings.redis)
        self.streams = RedisTokenStreams(self.client, settings.streams)
        self.counters = LimitCounters(self.client, 5.0)
        self.reservations = Reservations(self.counters, self.streams)

    async def take(self) -> str:
        rid = make_request_id(time.time_ns() // 1_000_000, secrets.token_bytes(10))
        found = await self.counters.take(rid, [LimitScope("key:k", EVERYTHING)], RESERVED, 60_000)
        assert not isinstance(found, LimitReached)
        return rid

    async def begin(self, rid: str) -> None:
        """Its stream, with seven prompt tokens and two of text."""
        await self.streams.create(rid, Accepted(tenant="t", tier="free", model="m", created_ms=1))
        await self.streams.append([(rid, MODERATED, Moderated(prompt_tokens=7))])
        await start_attempt(self.streams, rid, 1, "w", "1")
        await self.streams.append([(rid, StreamId(1, n), Text("a", (n,))) for n in (1, 2)])

    async def seal(self, rid: str) -> None:
        await self.streams.seal(rid, Terminal(status=Status.CANCELLED))

    async def left(self) -> tuple[int, int, int]:
        """Reservations, permits, and the tokens of the minute."""
        minute = await self.client.hvals("hr:{limits}:key:k:t")
        return (
            await self.client.zcard("hr:{limits}:unsettled"),
            await self.client.zcard("hr:{limits}:key:k:o"),
            sum(map(int, minute)),
        )


@pytest.fixture
async def rig(settings: Callable[..., Settings]) -> AsyncIterator[Rig]:
    made = Rig(settings())
    yield made
    await made.client.aclose()


async def test_an_outcome_settles_what_was_really_produced_J11(rig: Rig) -> None:
    rid = await rig.take()
    await rig.begin(rid)
    await rig.seal(rid)
    reply = Reply().extend(await rig.streams.read_all(rid))
    assert reply.accepted is not None
    outcome = outcome_of_stream(rid, reply.accepted, reply, now_ms=2)
    for _ in range(3):
        await rig.reservations.settle(outcome)
    assert await rig.left() == (0, 0, 9)


async def test_a_gateway_that_died_before_the_stream_was_made_has_taken_nothing_J2(rig: Rig) -> None:
    await rig.take()
    await rig.reservations.look(60_000)
    assert await rig.left() == (1, 1, RESERVED)
    await rig.reservations.look(0)
    assert await rig.left() == (0, 0, 0)
    assert await rig.client.hvals("hr:{limits}:key:k:r") == [b"0"]
    assert set(await rig.client.hvals("hr:{limits}:key:k:d")) == {b"0"}


async def test_a_sealed_request_without_an_outcome_is_settled_by_its_stream_J2_J11(rig: Rig) -> None:
    rid = await rig.take()
    await rig.begin(rid)
    await rig.reservations.look(0)
    assert await rig.left() == (1, 1, RESERVED)
    await rig.seal(rid)
    await rig.reservations.look(0)
    assert await rig.left() == (0, 0, 9)


async def test_open_requests_are_looked_at_in_turn(rig: Rig) -> None:
    running = await rig.take()
    await rig.begin(running)
    await rig.reservations.look(0)
    lost = await rig.take()
    assert await rig.counters.unsettled(0, 1) == [running]
    await rig.reservations.look(0)
    assert await rig.counters.unsettled(0, 10) == [running]
    assert lost not in await rig.client.zrange("hr:{limits}:unsettled", 0, -1)


async def test_a_reservation_that_has_lapsed_is_forgotten(rig: Rig) -> None:
    rid = await rig.take()
    await rig.client.delete(f"hr:{{limits}}:taken:{rid}")
    await rig.reservations.look(0)
    assert (await rig.left())[0] == 0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with restartable("valkey", tmp_path) as made:
        yield made


async def test_a_redis_that_does_not_answer_costs_one_call_a_second_its_time(
    server: RedisServer,
) -> None:
    now = 0.0
    client: Any = connect(RedisSettings(url=server.url))
    counters = LimitCounters(client, 0.2, lambda: now)
    scopes = [LimitScope("key:k", EVERYTHING)]
    await counters.take("a", scopes, 1, 60_000)
    assert server._process is not None
    server._process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(StreamsUnavailable, match="too long"):
            await counters.take("b", scopes, 1, 60_000)
        with pytest.raises(StreamsUnavailable, match="a moment ago"):
            await counters.take("c", scopes, 1, 60_000)
        now += 1.1
        with pytest.raises(StreamsUnavailable, match="too long"):
            await counters.take("d", scopes, 1, 60_000)
    finally:
        server._process.send_signal(signal.SIGCONT)
    now += 1.1
    await counters.take("e", scopes, 1, 60_000)
    await counters.take("f", scopes, 1, 60_000)
    await client.aclose()
