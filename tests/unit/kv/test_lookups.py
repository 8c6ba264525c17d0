"""Lookups beside the engine: answered, or over in time; whatever Redis does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from redis import Redis

from kv.lookups import Lookup, Lookups
from kv.store import ChunkStore
from tests.tcp_proxy import TcpProxy

SECONDS = 10.0
SHORT = 0.1
TTL_MS = 60_000

Make = Callable[..., Lookups]


@pytest.fixture
async def make(proxy: TcpProxy, tier: Redis) -> AsyncIterator[Make]:
    made: list[tuple[Lookups, ChunkStore]] = []

    def build(seconds: float = SECONDS, url: str | None = None, *, cluster: bool = False) -> Lookups:
        store = ChunkStore(url or proxy.url, connections=1, cluster=cluster)
        made.append((Lookups(store, ttl_ms=TTL_MS, seconds=seconds), store))
        return made[-1][0]

    tier.mset({"a": "1", "b": "2"})
    yield build
    proxy.before, proxy.delay_seconds = None, 0.0
    for lookups, store in made:
        lookups.close()
        await asyncio.to_thread(lookups._thread.join, 5)
        assert not lookups._thread.is_alive()
        store.close()


async def over(lookups: Lookups, lookup: Lookup) -> Lookup:
    deadline = time.monotonic() + 20
    while not lookup.over:
        assert time.monotonic() < deadline
        await asyncio.to_thread(lookups.wait, [lookup], 5)
    return lookup


async def asked(lookups: Lookups, keys: Sequence[str]) -> list[bool] | str | None:
    """The answer, or why there is none."""
    lookup = await over(lookups, lookups.ask(keys))
    assert (lookup.present is None) != (lookup.failure is None)
    return lookup.failure if lookup.present is None else lookup.present


async def until(lookups: Lookups, outcome: list[bool] | str, keys: Sequence[str] = ("a",)) -> None:
    """Ask until that is the outcome. There may be misses before it, but no other answer."""
    async with asyncio.timeout(20):
        while (found := await asked(lookups, keys)) != outcome:
            assert isinstance(found, str)
            await asyncio.sleep(0.02)


async def held(proxy: TcpProxy) -> tuple[asyncio.Event, list[bytes]]:
    """From now on nothing reaches the server until the event is set; and what was asked."""
    free, seen = asyncio.Event(), list[bytes]()

    async def hold(data: bytes) -> None:
        seen.append(data)
        await free.wait()

    proxy.before = hold
    return free, seen


async def sent(seen: list[bytes]) -> None:
    """Until the first question is on its way, and no longer in the queue."""
    async with asyncio.timeout(10):
        while not seen:
            await asyncio.sleep(0.01)


async def test_keys_are_answered_in_their_order_and_live_on(make: Make, tier: Redis) -> None:
    lookups = make()
    lookup = await over(lookups, lookups.ask(["a", "no", "b", "a"]))
    assert (lookup.present, lookup.failure) == ([True, False, True, True], None)
    assert 0 < lookup.seconds < SECONDS
    assert all(0 < tier.pttl(key) <= TTL_MS for key in ("a", "b"))


async def test_no_keys_need_no_answer(make: Make, proxy: TcpProxy) -> None:
    lookup = make().ask([])
    assert (lookup.present, lookup.over, proxy.made) == ([], True, 0)


async def test_each_of_many_questions_gets_its_own_answer(make: Make, tier: Redis) -> None:
    lookups = make()
    there = {f"k{i}" for i in range(0, 200, 3)}
    tier.mset(dict.fromkeys(there, "x"))
    questions = [lookups.ask([f"k{i}", "a", f"k{i + 1}"]) for i in range(199)]
    for i, question in enumerate(questions):
        await over(lookups, question)
        assert question.present == [f"k{i}" in there, True, f"k{i + 1}" in there]


async def test_a_slow_server_is_a_miss_then_left_alone_then_tried_again(
    make: Make, proxy: TcpProxy
) -> None:
    lookups = make(SHORT)
    await until(lookups, [True])
    proxy.delay_seconds = 3 * SHORT
    assert await asked(lookups, ["a"]) == "timeout"
    await until(lookups, "down")
    proxy.delay_seconds = 0.0
    await until(lookups, [True])
    await until(lookups, [False], ["no"])


async def test_h1_an_answer_that_comes_too_late_is_nobody_s(make: Make, proxy: TcpProxy) -> None:
    lookups = make(SHORT)
    proxy.delay_seconds = 2 * SHORT
    late = await over(lookups, lookups.ask(["a", "a", "a"]))
    proxy.delay_seconds = 0.0
    await until(lookups, [True])
    await until(lookups, [False, True, False], ["no", "a", "no"])
    assert (late.present, late.failure) == (None, "timeout")


async def test_a_connection_that_breaks_is_a_miss_and_the_next_question_is_answered(
    make: Make, proxy: TcpProxy
) -> None:
    lookups = make()
    free, seen = await held(proxy)
    lookup = lookups.ask(["a"])
    await sent(seen)
    proxy.cut()
    proxy.before = None
    assert (await over(lookups, lookup)).failure == "connection"
    free.set()
    assert await asked(lookups, ["a", "no"]) == [True, False]


async def test_with_nobody_there_each_question_is_over(make: Make) -> None:
    lookups = make(url="redis://127.0.0.1:1/0")
    assert [await asked(lookups, ["a"]) for _ in range(3)] == ["connection", "connection", "down"]


async def test_with_no_cluster_there_each_question_is_over(make: Make) -> None:
    lookups = make(url="redis://127.0.0.1:1/0", cluster=True)
    assert [await asked(lookups, ["a"]) for _ in range(3)] == ["connection", "connection", "down"]


async def test_more_questions_than_may_wait_are_misses_at_once(make: Make, proxy: TcpProxy) -> None:
    lookups = make()
    assert await asked(lookups, ["a"]) == [True]
    free, seen = await held(proxy)
    waiting = [lookups.ask(["a"])]
    await sent(seen)
    while (lookup := lookups.ask(["a", "no"])).failure is None:
        waiting.append(lookup)
        assert len(waiting) <= 1_000
    assert (lookup.failure, lookup.over, len(waiting)) == ("busy", True, 257)
    free.set()
    proxy.before = None
    for lookup in waiting:
        await over(lookups, lookup)
    assert [lookup.present for lookup in waiting] == [[True], *[[True, False]] * 256]


async def test_a_question_whose_time_is_over_is_neither_asked_nor_answered(
    make: Make, proxy: TcpProxy
) -> None:
    lookups = make()
    assert await asked(lookups, ["a"]) == [True]
    free, seen = await held(proxy)
    on_its_way = lookups.ask(["a"])
    await sent(seen)
    waiting = lookups.ask(["waiting"])
    for lookup in (on_its_way, waiting):
        lookup.deadline = 0.0
        assert lookup.over
    free.set()
    assert await asked(lookups, ["a"]) == [True]
    for lookup in (on_its_way, waiting):
        assert (lookup.present, lookup.failure) == (None, "timeout")
    assert b"waiting" not in b"".join(seen)


async def test_waiting_ends_when_any_of_several_is_over(make: Make, proxy: TcpProxy) -> None:
    lookups = make()
    await held(proxy)
    never, done = lookups.ask(["a"]), Lookup(["b"], 0.0)
    async with asyncio.timeout(5):
        await asyncio.to_thread(lookups.wait, [never, done], SECONDS)
    assert (never.over, done.over) == (False, True)


async def test_waiting_for_nothing_that_comes_ends_too(make: Make, proxy: TcpProxy) -> None:
    lookups = make()
    free, _ = await held(proxy)
    lookup = lookups.ask(["a"])
    await asyncio.to_thread(lookups.wait, [lookup], 0.01)
    assert not lookup.over
    free.set()
    assert (await over(lookups, lookup)).present == [True]


async def test_closed_it_answers_what_is_on_its_way_and_its_thread_ends(
    make: Make, proxy: TcpProxy
) -> None:
    lookups = make()
    free, seen = await held(proxy)
    on_its_way = lookups.ask(["a"])
    await sent(seen)
    waiting = [lookups.ask(["a"]) for _ in range(300)]
    assert waiting[-1].failure == "busy"
    lookups.close()
    free.set()
    assert (await over(lookups, on_its_way)).present == [True]
    await asyncio.to_thread(lookups._thread.join, 5)
    assert not lookups._thread.is_alive()
    assert [lookup.present for lookup in waiting] == [None] * 300
