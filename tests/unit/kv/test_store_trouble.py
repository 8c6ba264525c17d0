"""The store on a bad network: a call that fails says so in time, and its answer reaches nobody else (H1)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import Any

import pytest
from redis import Redis

from kv.errors import TierUnavailable
from kv.store import ChunkStore
from tests.tcp_proxy import TcpProxy

SECONDS = 5.0
SHORT = 0.1
TTL_MS = 60_000
LONG_VALUE = random.Random(1).randbytes(1_000_000)


@pytest.fixture
async def store(proxy: TcpProxy, tier: Redis) -> AsyncIterator[ChunkStore]:
    tier.set("k", b"mine")
    tier.set("long", LONG_VALUE)
    made = ChunkStore(proxy.url, connections=4)
    yield made
    made.close()


def read(store: ChunkStore, key: str, seconds: float = SECONDS) -> bytes | None:
    buffer = bytearray(len(LONG_VALUE))
    size = store.read(key, memoryview(buffer), seconds)
    return None if size is None else bytes(buffer[:size])


async def unavailable(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(TierUnavailable) as raised:
        await asyncio.to_thread(call, *args)
    return raised.value.reason


async def works(store: ChunkStore) -> None:
    """Every kind of call is answered, and with its own answer."""
    assert await asyncio.to_thread(read, store, "k") == b"mine"
    await asyncio.to_thread(store.write, "new", (b"new",), TTL_MS, SECONDS)
    assert await asyncio.to_thread(store.touch, ["no", "new", "k"], TTL_MS, SECONDS) == [
        False, True, True,
    ]  # fmt: skip
    assert await asyncio.to_thread(read, store, "new") == b"new"
    await asyncio.to_thread(store.delete, "new", SECONDS)
    assert await asyncio.to_thread(read, store, "new") is None
    assert await asyncio.to_thread(read, store, "long") == LONG_VALUE


def cut_after(size: int) -> Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]:
    """Passes on so many bytes in all, and breaks the connection."""
    left = size

    async def instead(data: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        writer.write(data[:left])
        await writer.drain()
        left = max(0, left - len(data))
        if not left:
            writer.close()

    return instead


@pytest.mark.parametrize("size", [1, 5, 9, 10, 11, 1_000, 700_000, len(LONG_VALUE) + 10])
async def test_h1_a_connection_cut_within_a_value_is_no_answer(
    store: ChunkStore, proxy: TcpProxy, size: int
) -> None:
    await works(store)
    proxy.instead = cut_after(size)
    assert await unavailable(read, store, "long") == "connection"
    proxy.instead = None
    await works(store)


async def test_h1_a_connection_cut_before_any_answer_is_no_answer(
    store: ChunkStore, proxy: TcpProxy
) -> None:
    await works(store)

    async def cut(_: bytes) -> None:
        proxy.cut()

    for call, args in (
        (read, (store, "k")),
        (store.write, ("k", (LONG_VALUE,), TTL_MS, SECONDS)),
        (store.touch, (["k"], TTL_MS, SECONDS)),
        (store.delete, ("k", SECONDS)),
    ):
        proxy.before = cut
        assert await unavailable(call, *args) == "connection"
        proxy.before = None
        await works(store)


async def test_h1_connections_that_were_cut_while_unused_are_made_anew(
    store: ChunkStore, proxy: TcpProxy
) -> None:
    for _ in range(3):
        await works(store)
        made = proxy.made
        proxy.cut()
        await asyncio.sleep(0.01)
        await works(store)
        assert proxy.made > made


async def test_h1_an_answer_that_comes_too_late_reaches_nobody(
    store: ChunkStore, proxy: TcpProxy
) -> None:
    await works(store)
    for call, args in (
        (read, (store, "long", SHORT)),
        (store.write, ("k", (b"mine",), TTL_MS, SHORT)),
    ):
        proxy.delay_seconds = 2 * SHORT
        assert await unavailable(call, *args) == "timeout"
        proxy.delay_seconds = 0.0
        await works(store)


async def test_h1_the_rest_of_a_value_that_does_not_fit_reaches_nobody(
    store: ChunkStore, proxy: TcpProxy
) -> None:
    await works(store)
    free, header = asyncio.Event(), len(f"${len(LONG_VALUE)}\r\n")

    async def begin(data: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data[:header])
        if data[header:]:
            await free.wait()
            writer.write(data[header:])

    proxy.instead = begin
    size = await asyncio.to_thread(store.read, "long", memoryview(bytearray(9)), SECONDS)
    assert size == len(LONG_VALUE)
    assert await asyncio.to_thread(read, store, "k") == b"mine"
    proxy.instead = None
    free.set()
    await works(store)


async def test_h1_touch_and_delete_that_come_too_late_reach_nobody(proxy: TcpProxy, tier: Redis) -> None:
    """These take as long as the store's first call was given."""
    seconds = 0.2
    tier.set("k", b"mine")
    store = ChunkStore(proxy.url, connections=1)
    assert await asyncio.to_thread(store.touch, ["no"], TTL_MS, seconds) == [False]
    for call, args in (
        (store.touch, (["k"] * 3, TTL_MS, seconds)),
        (store.delete, ("no", seconds)),
        (store.infos, (seconds,)),
    ):
        proxy.delay_seconds = seconds
        assert await unavailable(call, *args) == "timeout"
        proxy.delay_seconds = 0.0
        assert await asyncio.to_thread(read, store, "k") == b"mine"
    store.close()


async def test_h1_whatever_happens_a_reader_gets_its_own_value_or_none(
    store: ChunkStore, proxy: TcpProxy, tier: Redis
) -> None:
    chance = random.Random(7)
    values = {f"k{i}": chance.randbytes(chance.randint(1, 100_000)) for i in range(20)}
    for key, value in values.items():
        tier.set(key, value)
    outcomes: set[str] = set()
    enough = asyncio.Event()

    def reader(seed: int) -> None:
        order = random.Random(seed)
        while not enough.is_set():
            key = order.choice(list(values))
            try:
                assert read(store, key, order.choice([0.005, 0.02, 5.0])) == values[key]
                outcomes.add("answered")
            except TierUnavailable as error:
                outcomes.add(error.reason)

    readers = [asyncio.create_task(asyncio.to_thread(reader, seed)) for seed in range(4)]
    for disturbed in count():
        if any(task.done() for task in readers):
            break
        if disturbed >= 25 and outcomes >= {"answered", "timeout", "connection"}:
            enough.set()
        proxy.delay_seconds = chance.choice([0.0, 0.0, 0.01, 0.03])
        if chance.random() < 0.3:
            proxy.cut()
        await asyncio.sleep(0.02)
    enough.set()
    await asyncio.gather(*readers)
    assert outcomes == {"answered", "timeout", "connection"}


async def test_a_server_that_trickles_is_not_waited_for_beyond_the_deadline(
    store: ChunkStore, proxy: TcpProxy
) -> None:
    """Each byte comes soon after the one before, and all of them would take half an hour."""
    await works(store)
    passed = 0

    async def trickle(data: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal passed
        for at in range(len(data)):
            if writer.transport.is_closing():
                return
            writer.write(data[at : at + 1])
            passed += 1
            await asyncio.sleep(0.01)

    proxy.instead = trickle
    assert await unavailable(read, store, "long", 2 * SHORT) == "timeout"
    proxy.instead = None
    assert 1 < passed < len(LONG_VALUE)
    await works(store)


async def test_a_server_that_takes_nothing_is_not_waited_for(store: ChunkStore, proxy: TcpProxy) -> None:
    await works(store)
    stuck = asyncio.Event()

    async def hold(_: bytes) -> None:
        await stuck.wait()

    proxy.before = hold
    big = bytes(30_000_000)
    assert await unavailable(store.write, "big", (big,), TTL_MS, 2 * SHORT) == "timeout"
    proxy.before = None
    stuck.set()
    await works(store)


@pytest.mark.parametrize("answer", [b"*1\r\n$1\r\n1\r\n", b":1\r\n", b"+OK\r\n", b"x" * 2_000])
async def test_an_answer_of_another_kind_is_not_taken_for_a_value(
    store: ChunkStore, proxy: TcpProxy, answer: bytes
) -> None:
    await works(store)

    async def other(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    proxy.instead = other
    assert await unavailable(read, store, "k") == "protocol"
    proxy.instead = None
    await works(store)


async def test_each_call_has_its_own_time_whatever_the_one_before_has_left_over(
    proxy: TcpProxy, tier: Redis
) -> None:
    """A round trip takes more than half of it."""
    store = ChunkStore(proxy.url, connections=1)
    seconds, slow = 0.8, 0.22
    tier.set("k", b"mine")
    assert await asyncio.to_thread(read, store, "k", seconds) == b"mine"
    proxy.delay_seconds = slow
    assert await asyncio.to_thread(read, store, "k", seconds) == b"mine"
    assert await asyncio.to_thread(store.touch, ["k"], TTL_MS, seconds) == [True]
    proxy.delay_seconds = 0.0
    store.close()
