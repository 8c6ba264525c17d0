"""The hub on real servers: exactly once, in order, through overflows, restarts and losses."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from contracts.entries import Accepted, StreamEntry, Terminal, Text
from contracts.identity import make_request_id
from contracts.stream_ids import ACCEPTED, SEAL, START, StreamId
from contracts.tiers import FinishReason, Status
from contracts.token_stream import StreamsUnavailable
from infra.presence_redis import ReaderPresence
from infra.settings import RedisSettings, StreamSettings
from infra.stream_redis import RedisTokenStreams, connect, stream_key
from streaming_edge.errors import StreamLost
from streaming_edge.hub import Hub, Subscription
from tests.attempts import start_attempt
from tests.redis_servers import SERVERS, RedisServer, restartable

ACCEPT = Accepted(tenant="t", tier="paid", model="m", created_ms=1)
DONE = Terminal(status=Status.COMPLETED, finish_reasons=[FinishReason.STOP])
BUFFER = 16


class Rig:
    def __init__(self, url: str, timeout_seconds: float = 5.0) -> None:
        redis_settings = RedisSettings(url=url, timeout_seconds=timeout_seconds)
        self.client = connect(redis_settings)
        self.reader_client = connect(redis_settings, blocking=True)
        self.streams = RedisTokenStreams(self.client, StreamSettings())
        self.hub = Hub(self.streams, self.reader_client, BUFFER, ReaderPresence(self.client))

    async def opened(self) -> str:
        rid = make_request_id(1, secrets.token_bytes(10))
        await self.streams.create(rid, ACCEPT)
        return rid

    async def write(self, rid: str, first: int, last: int, attempt: int = 1) -> None:
        await self.streams.append(
            [(rid, StreamId(attempt, n), Text(f"{n} ", (n,))) for n in range(first, last + 1)]
        )

    async def ready(self) -> None:
        await eventually(lambda: self.hub.not_ready() is None, "the hub is connected")


@asynccontextmanager
async def rig_at(url: str, timeout_seconds: float = 5.0) -> AsyncIterator[Rig]:
    rig = Rig(url, timeout_seconds)
    await rig.hub.start()
    try:
        yield rig
    finally:
        await rig.hub.stop()
        await rig.client.aclose()
        await rig.reader_client.aclose()


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    with restartable(request.param, tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture
async def rig(server: RedisServer) -> AsyncIterator[Rig]:
    async with rig_at(server.url) as found:
        await found.ready()
        yield found


async def eventually(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


async def rest(subscription: Subscription, seconds: float = 20.0) -> list[StreamEntry]:
    """Everything up to the terminal entry."""
    items: list[StreamEntry] = []
    async with asyncio.timeout(seconds):
        while not subscription.ended:
            items += await subscription.next(5.0)
    return items


async def read_up_to(subscription: Subscription, last: StreamId) -> list[StreamEntry]:
    items: list[StreamEntry] = []
    async with asyncio.timeout(20):
        while not items or items[-1].id < last:
            items += await subscription.next(5.0)
    return items


def ids(items: list[StreamEntry]) -> list[StreamId]:
    return [item.id for item in items]


def tokens(first: int, last: int) -> list[StreamId]:
    return [StreamId(1, n) for n in range(first, last + 1)]


async def test_entries_come_live_in_order_and_once(rig: Rig) -> None:
    rid = await rig.opened()
    async with rig.hub.subscribe(rid, START) as subscription:
        assert ids(await read_up_to(subscription, ACCEPTED)) == [ACCEPTED]
        await rig.write(rid, 1, 3)
        assert ids(await read_up_to(subscription, StreamId(1, 3))) == tokens(1, 3)
        await rig.streams.seal(rid, DONE)
        assert ids(await rest(subscription)) == [SEAL]
        assert subscription.ended
        assert await subscription.next(5.0) == []


async def test_a_quiet_stream_is_an_empty_list_after_the_timeout(rig: Rig) -> None:
    rid = await rig.opened()
    async with rig.hub.subscribe(rid, ACCEPTED) as subscription:
        assert await subscription.next(0.0) == []
        assert await subscription.next(0.05) == []


async def test_a_new_subscription_wakes_a_read_that_blocks(rig: Rig) -> None:
    first, second = await rig.opened(), await rig.opened()
    async with rig.hub.subscribe(first, ACCEPTED) as quiet:
        assert await quiet.next(0.1) == []
        async with rig.hub.subscribe(second, START) as subscription:
            # Well inside the two seconds that the blocking read would wait by itself.
            assert ids(await subscription.next(1.0)) == [ACCEPTED]


async def test_a_sealed_stream_is_replayed_whole_from_any_offset_e11(rig: Rig) -> None:
    rid = await rig.opened()
    await rig.write(rid, 1, 100)
    await rig.streams.seal(rid, DONE)
    everything = [ACCEPTED, *tokens(1, 100), SEAL]
    for at in (0, 1, 57, 100):
        async with rig.hub.subscribe(rid, everything[at]) as subscription:
            assert ids(await rest(subscription)) == everything[at + 1 :]


async def test_after_the_seal_the_terminal_entry_is_all_there_is(rig: Rig) -> None:
    rid = await rig.opened()
    await rig.streams.seal(rid, DONE)
    async with rig.hub.subscribe(rid, SEAL) as subscription:
        assert ids(await rest(subscription)) == [SEAL]


async def test_readers_of_one_stream_are_independent_cursors_e8(rig: Rig) -> None:
    rid = await rig.opened()
    await rig.write(rid, 1, 10)
    async with rig.hub.subscribe(rid, StreamId(1, 8)) as late:
        assert ids(await read_up_to(late, StreamId(1, 10))) == tokens(9, 10)
        async with rig.hub.subscribe(rid, StreamId(1, 3)) as early:
            await rig.write(rid, 11, 12)
            assert ids(await read_up_to(early, StreamId(1, 12))) == tokens(4, 12)
            assert ids(await read_up_to(late, StreamId(1, 12))) == tokens(11, 12)
        await rig.streams.seal(rid, DONE)
        assert ids(await rest(late)) == [SEAL]


async def test_a_reader_that_takes_nothing_loses_nothing_and_holds_up_nobody_f1(rig: Rig) -> None:
    rid = await rig.opened()
    before = REGISTRY.get_sample_value("headrace_reader_catch_ups_total") or 0.0
    async with rig.hub.subscribe(rid, START) as slow, rig.hub.subscribe(rid, START) as fast:
        for n in range(1, 1_001, 50):
            await rig.write(rid, n, n + 49)
            assert ids(await read_up_to(fast, StreamId(1, n + 49)))[-1] == StreamId(1, n + 49)
            assert slow.state.buffered <= BUFFER
        await rig.streams.seal(rid, DONE)
        assert ids(await rest(slow)) == [ACCEPTED, *tokens(1, 1_000), SEAL]
    assert (REGISTRY.get_sample_value("headrace_reader_catch_ups_total") or 0.0) > before


async def test_resubscribing_after_the_last_reader_left_begins_where_it_asks_e1(rig: Rig) -> None:
    rid = await rig.opened()
    await rig.write(rid, 1, 20)
    seen: list[StreamId] = []
    at = START
    for _ in range(6):
        async with rig.hub.subscribe(rid, at) as subscription:
            taken = (await subscription.next(5.0))[:4]
            seen += ids(taken)
            at = seen[-1]
    assert seen == [ACCEPTED, *tokens(1, 20)][: len(seen)]
    async with rig.hub.subscribe(rid, START) as subscription:
        assert ids(await read_up_to(subscription, StreamId(1, 20))) == [ACCEPTED, *tokens(1, 20)]


async def test_leaving_frees_everything(rig: Rig) -> None:
    rid = await rig.opened()
    readers = REGISTRY.get_sample_value("headrace_readers")
    async with rig.hub.subscribe(rid, START), rig.hub.subscribe(rid, START):
        assert len(rig.hub._feeds) == 1
    assert rig.hub._feeds == rig.hub._unsealed == {}
    assert REGISTRY.get_sample_value("headrace_readers") == readers


async def test_a_cancelled_wait_loses_nothing_h2(rig: Rig) -> None:
    rid = await rig.opened()
    async with rig.hub.subscribe(rid, START) as subscription:
        seen: list[StreamId] = []
        for n in range(1, 60):
            waiting = asyncio.ensure_future(subscription.next(5.0))
            await rig.write(rid, n, n)
            waiting.cancel()
            try:
                seen += ids(await waiting)
            except asyncio.CancelledError:
                pass
        await rig.streams.seal(rid, DONE)
        seen += ids(await rest(subscription))
    assert seen == [ACCEPTED, *tokens(1, 59), SEAL]


async def test_a_vanished_stream_is_told_to_its_readers_h8_e10(rig: Rig) -> None:
    rid, other = await rig.opened(), await rig.opened()
    async with (
        rig.hub.subscribe(rid, START) as subscription,
        rig.hub.subscribe(other, ACCEPTED) as lives,
    ):
        await read_up_to(subscription, ACCEPTED)
        await rig.client.delete(stream_key(rid))
        async with asyncio.timeout(10):
            with pytest.raises(StreamLost):
                await subscription.next(10.0)
        await rig.write(other, 1, 1)
        assert ids(await read_up_to(lives, StreamId(1, 1))) == tokens(1, 1)


async def test_a_stream_that_was_made_anew_is_not_taken_for_the_old_one_e10(rig: Rig) -> None:
    rid = await rig.opened()
    await rig.write(rid, 1, 80)
    async with rig.hub.subscribe(rid, StreamId(1, 80)) as subscription:
        await rig.client.flushdb()
        await rig.streams.create(rid, ACCEPT)
        async with asyncio.timeout(10):
            with pytest.raises(StreamLost):
                await subscription.next(10.0)


async def test_a_reader_that_catches_up_in_a_vanished_stream_is_told(rig: Rig) -> None:
    rid = await rig.opened()
    async with rig.hub.subscribe(rid, START) as slow, rig.hub.subscribe(rid, START) as fast:
        await rig.write(rid, 1, 100)
        await read_up_to(fast, StreamId(1, 100))
        await rig.client.delete(stream_key(rid))
        with pytest.raises(StreamLost):
            await read_up_to(slow, StreamId(1, 100))


async def test_the_end_is_read_when_its_notice_was_lost_with_the_connection_e2(rig: Rig) -> None:
    rid = await rig.opened()
    async with rig.hub.subscribe(rid, ACCEPTED) as subscription:
        assert await subscription.next(0.05) == []
        for connection in await rig.client.client_list():
            if connection["cmd"].lower().startswith("xread"):
                await rig.client.client_kill(connection["addr"])
        await rig.streams.seal(rid, DONE)
        assert ids(await rest(subscription)) == [SEAL]


async def test_readers_live_through_restarts_of_the_server_h10(rig: Rig, server: RedisServer) -> None:
    rid = await rig.opened()
    async with rig.hub.subscribe(rid, START) as subscription:
        seen = ids(await read_up_to(subscription, ACCEPTED))
        for n in range(1, 4):
            server.stop()
            await eventually(lambda: rig.hub.not_ready() is not None, "the outage is seen")
            assert await subscription.next(0.05) == []
            server.start()
            await rig.ready()
            await rig.write(rid, n, n)
            seen += ids(await read_up_to(subscription, StreamId(1, n)))
        await rig.streams.seal(rid, DONE)
        seen += ids(await rest(subscription))
    assert seen == [ACCEPTED, *tokens(1, 3), SEAL]


async def test_a_hub_that_starts_before_its_server_gets_ready_later_h11(server: RedisServer) -> None:
    server.stop()
    try:
        async with rig_at(server.url) as rig:
            assert rig.hub.not_ready() is not None
            server.start()
            await rig.ready()
            rid = await rig.opened()
            async with rig.hub.subscribe(rid, START) as subscription:
                assert ids(await read_up_to(subscription, ACCEPTED)) == [ACCEPTED]
    finally:
        server.stop()
        server.start()


async def test_a_block_longer_than_the_socket_timeout_is_no_failure_h4(server: RedisServer) -> None:
    async with rig_at(server.url) as rig:
        patient = rig.reader_client
        hasty = connect(RedisSettings(url=server.url, timeout_seconds=0.3))
        hub = Hub(rig.streams, hasty, BUFFER, ReaderPresence(rig.client))
        await hub.start()
        rid = await rig.opened()
        async with hub.subscribe(rid, ACCEPTED) as subscription:
            for _ in range(8):
                assert await subscription.next(0.1) == []
            await eventually(lambda: hub.not_ready() is None, "still connected")
            await rig.write(rid, 1, 1)
            assert ids(await read_up_to(subscription, StreamId(1, 1))) == tokens(1, 1)
        await hub.stop()
        await hasty.aclose()
        assert patient is rig.reader_client


async def test_a_stopped_hub_says_so_to_who_waits_q2(rig: Rig) -> None:
    rid = await rig.opened()
    async with rig.hub.subscribe(rid, ACCEPTED) as subscription:
        waiting = asyncio.ensure_future(subscription.next(30.0))
        await asyncio.sleep(0)
        await rig.hub.stop()
        with pytest.raises(StreamsUnavailable):
            await waiting
    assert rig.hub.not_ready() is not None


async def test_many_readers_open_and_close_and_the_pool_stays_clean_h2(rig: Rig) -> None:
    rids = [await rig.opened() for _ in range(20)]

    async def visit(rid: str) -> list[StreamEntry]:
        async with rig.hub.subscribe(rid, START) as subscription:
            return await subscription.next(5.0)

    for _ in range(10):
        visits = [asyncio.ensure_future(visit(rid)) for rid in rids]
        await asyncio.sleep(0)
        for visiting in visits[::2]:
            visiting.cancel()
        done = await asyncio.gather(*visits, return_exceptions=True)
        assert all(ids(found) == [ACCEPTED] for found in done if isinstance(found, list))
    assert await rig.reader_client.get("nothing") is None
    assert await rig.streams.last_ids(rids) == [ACCEPTED] * 20


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    after=st.integers(0, 30),
    takeover=st.booleans(),
)
async def test_any_pace_of_writer_and_readers_gives_every_reader_the_same_text_e1(
    server: RedisServer, sizes: list[int], after: int, takeover: bool
) -> None:
    async with rig_at(server.url) as rig:
        await rig.ready()
        rid = await rig.opened()
        await rig.write(rid, 1, 30)
        begin = StreamId(1, after) if after else START

        async def reader(offset: StreamId) -> list[StreamEntry]:
            async with rig.hub.subscribe(rid, offset) as subscription:
                return await rest(subscription)

        readers = [asyncio.ensure_future(reader(o)) for o in (START, begin, StreamId(1, 30), begin)]
        at = 30
        for size in sizes:
            await rig.write(rid, at + 1, at + size)
            at += size
            await asyncio.sleep(0)
        if takeover:
            await start_attempt(rig.streams, rid, 2, "b")
            await rig.write(rid, at + 1, at + 5, attempt=2)
        await rig.streams.seal(rid, DONE)
        whole, *partial = await asyncio.gather(*readers)
        assert whole == await rig.streams.read_all(rid)
        for offset, found in zip((begin, StreamId(1, 30), begin), partial, strict=True):
            assert found == [item for item in whole if item.id > offset]
