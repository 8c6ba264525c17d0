"""What a worker's events say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from contracts.records import DispatchRecord, Sampling
from contracts.tiers import QueueClass
from contracts.worker_events import WorkerEvent
from infra.tasks import end_tasks
from kv.layout import CHUNK_TOKENS
from workers.credits import CreditLedger
from workers.heartbeat import PREFIXES_PER_EVENT, TIER_PREFIXES_PER_EVENT, Heartbeat
from workers.in_hand import InHand
from workers.prefix_memory import PrefixMemory
from workers.protocols import Capacity, TierNews

SLOTS = 4


def record(
    name: str, *, attempt: int = 1, choices: int = 1, prompt: int = 10, **fields: Any
) -> DispatchRecord:
    return DispatchRecord(
        request_id=name,
        tenant="t",
        key_id="k",
        tier="paid",
        queue_class=QueueClass.INTERACTIVE,
        model="m",
        pool="default",
        created_ms=0,
        deadline_ms=1,
        sampling=Sampling(n=choices, max_tokens=8),
        prompt_token_ids=[0] * prompt,
        moderated_ms=0,
        attempt=attempt,
        worker_id="w",
        dispatched_ms=0,
        **fields,
    )


@dataclass
class Request:
    record: DispatchRecord
    generated: int = 0
    prefilled: bool = False
    preempted: int = 0

    def preempt(self) -> None:
        self.preempted += 1


@dataclass
class Feed:
    """Takes events; while it fails, nobody knows whether they arrived."""

    events: list[WorkerEvent] = field(default_factory=list)
    fails: bool = False
    hangs: bool = False
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def publish(self, event: WorkerEvent) -> None:
        self.asked.set()
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        if self.fails:
            raise RedisConnectionError
        self.events.append(event)

    async def keep_slot(self, worker_id: str, slot: int, ttl_ms: int) -> bool:
        return True


@dataclass
class Schedulers:
    backlog: dict[str, int | None] = field(default_factory=dict)

    async def read(self) -> Mapping[str, int | None]:
        return dict(self.backlog)


@dataclass
class Tier:
    """An engine's news of its tier, which are told once, those found first."""

    held: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    rates: tuple[float | None, float | None] = (None, None)

    def take_news(self, limit: int) -> TierNews:
        held, self.held = self.held[:limit], self.held[limit:]
        rest = limit - len(held)
        missing, self.missing = self.missing[:rest], self.missing[rest:]
        return TierNews(held, missing, *self.rates)


class Bench:
    def __init__(self, *, chunks: int = 1_000, interval_ms: int = 3_600_000) -> None:
        self.feed = Feed()
        self.schedulers = Schedulers()
        self.in_hand = InHand()
        self.tier: Tier | None = None
        self.heartbeat = Heartbeat(
            self.feed,
            "w",
            0,
            interval_ms=interval_ms,
            slot_ttl_ms=10_000,
            capacity=lambda: Capacity(SLOTS, 0, chunks * CHUNK_TOKENS, 0),
            tier_news=lambda limit: self.tier.take_news(limit) if self.tier is not None else None,
            in_hand=self.in_hand,
            prefixes=PrefixMemory(chunks * CHUNK_TOKENS),
            credits=CreditLedger(1_000),
            schedulers=self.schedulers,
        )

    def take(self, request: Request) -> Request:
        self.heartbeat.taken(request.record)
        self.in_hand.add(request)
        return request

    async def event(self, *, timed: bool = False) -> WorkerEvent:
        await self.heartbeat.publish(timed=timed)
        return self.feed.events[-1]

    async def events(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.feed.events) < count:
                await asyncio.sleep(0)


async def test_how_far_replies_have_come_is_said_in_timed_events_only() -> None:
    bench = Bench()
    bench.take(Request(record("a"), generated=7))
    bench.take(Request(record("b")))
    assert (await bench.event()).generated == {}
    assert (await bench.event(timed=True)).generated == {"a": 7, "b": 0}


async def test_prompts_count_until_their_first_token() -> None:
    bench = Bench()
    first = bench.take(Request(record("a", prompt=30)))
    second = bench.take(Request(record("b", prompt=12)))
    assert (await bench.event()).prefill_tokens == 42
    first.prefilled = True
    assert (await bench.event()).prefill_tokens == 12
    bench.in_hand.remove(second)
    assert (await bench.event()).prefill_tokens == 0


async def test_news_that_was_not_published_goes_with_the_next_event_in_its_order() -> None:
    bench = Bench()
    bench.feed.fails = True
    bench.take(Request(record("a")))
    bench.heartbeat.finished("f1")
    bench.heartbeat.handed_over("h1")
    bench.heartbeat.prefilled(record("a", prefix_hashes=["p"]))
    with pytest.raises(RedisConnectionError):
        await bench.event()
    bench.feed.fails = False
    bench.take(Request(record("b")))
    bench.heartbeat.finished("f2")
    event = await bench.event()
    assert (event.taken, event.finished, event.handed_over) == (["a", "b"], ["f1", "f2"], ["h1"])
    assert event.prefixes == ["p"]
    event = await bench.event()
    assert (event.taken, event.finished, event.handed_over, event.prefixes) == ([], [], [], [])


async def test_news_of_an_event_that_was_cut_off_goes_with_the_last_one() -> None:
    bench = Bench()
    bench.feed.hangs = True
    bench.heartbeat.handed_over("h")
    running = asyncio.ensure_future(bench.heartbeat.run())
    async with asyncio.timeout(10):
        await bench.feed.asked.wait()
    await end_tasks([running])
    bench.feed.hangs = False
    assert (await bench.event()).handed_over == ["h"]


async def test_an_event_is_bounded_and_the_rest_of_the_prefixes_goes_with_the_next() -> None:
    bench = Bench()
    hashes = [str(i) for i in range(PREFIXES_PER_EVENT + 5)]
    bench.heartbeat.prefilled(record("a", prefix_hashes=hashes))
    first, second = await bench.event(), await bench.event()
    assert len(first.prefixes) == PREFIXES_PER_EVENT
    assert set(first.prefixes) | set(second.prefixes) == set(hashes)
    assert len(second.prefixes) == 5


async def test_an_engine_without_a_tier_tells_of_none() -> None:
    event = await Bench().event()
    assert (event.tier_prefixes, event.tier_prefixes_gone) == ([], [])
    assert (event.load_us_per_token, event.prefill_us_per_token) == (None, None)


async def test_news_of_the_tier_are_told_once_and_its_rates_always() -> None:
    bench = Bench()
    bench.tier = Tier(["a"], ["b"], (20.0, 100.0))
    first, second = await bench.event(), await bench.event()
    assert (first.tier_prefixes, first.tier_prefixes_gone) == (["a"], ["b"])
    assert (second.tier_prefixes, second.tier_prefixes_gone) == ([], [])
    for event in (first, second):
        assert (event.load_us_per_token, event.prefill_us_per_token) == (20.0, 100.0)


async def test_news_of_the_tier_and_of_the_cache_share_the_room_of_an_event() -> None:
    bench = Bench()
    hashes = [str(i) for i in range(PREFIXES_PER_EVENT)]
    bench.heartbeat.prefilled(record("a", prefix_hashes=hashes))
    in_tier = [f"t{i}" for i in range(TIER_PREFIXES_PER_EVENT + 5)]
    bench.tier = Tier(list(in_tier), ["gone"])
    events = [await bench.event() for _ in range(3)]
    for event in events:
        told = [event.prefixes, event.prefixes_gone, event.tier_prefixes, event.tier_prefixes_gone]
        assert sum(map(len, told)) <= PREFIXES_PER_EVENT
    assert len(events[0].tier_prefixes) == TIER_PREFIXES_PER_EVENT
    assert len(events[0].prefixes) == PREFIXES_PER_EVENT - TIER_PREFIXES_PER_EVENT
    assert [p for e in events for p in e.tier_prefixes] == in_tier
    assert [p for e in events for p in e.tier_prefixes_gone] == ["gone"]
    assert {p for e in events for p in e.prefixes} == set(hashes)


async def test_news_of_the_tier_that_were_not_published_go_with_the_next_event_before_later_ones() -> (
    None
):
    bench = Bench()
    bench.tier = Tier(["a"], [], (20.0, 100.0))
    bench.feed.fails = True
    for _ in range(2):
        with pytest.raises(RedisConnectionError):
            await bench.event()
    bench.feed.fails = False
    bench.tier.missing = ["a"]
    events = [await bench.event() for _ in range(3)]
    assert [e.tier_prefixes for e in events] == [["a"], [], []]
    assert [e.tier_prefixes_gone for e in events] == [[], ["a"], []]


async def test_prefixes_beyond_the_cache_are_reported_gone() -> None:
    bench = Bench(chunks=1)
    bench.heartbeat.prefilled(record("a", prefix_hashes=["p"]))
    await bench.event()
    bench.heartbeat.prefilled(record("b", prefix_hashes=["q"]))
    event = await bench.event()
    assert (event.prefixes, event.prefixes_gone) == (["q"], ["p"])


async def test_a_new_scheduler_is_told_all_prefixes_and_a_known_one_is_not() -> None:
    bench = Bench(interval_ms=1)
    bench.heartbeat.prefilled(record("a", prefix_hashes=["p"]))
    bench.schedulers.backlog = {"one": 0}
    running = asyncio.ensure_future(bench.heartbeat.run())
    try:
        await bench.events(3)
        assert [e.prefixes for e in bench.feed.events[:3]] == [["p"], [], []]
        bench.schedulers.backlog = {"one": 0, "two": 0}
        async with asyncio.timeout(10):
            while sum("p" in e.prefixes for e in bench.feed.events) < 2:
                await asyncio.sleep(0)
        seen = len(bench.feed.events)
        await bench.events(seen + 2)
        assert sum("p" in e.prefixes for e in bench.feed.events) == 2
    finally:
        await end_tasks([running])


async def test_free_slots_are_granted_to_the_schedulers_that_live_L4() -> None:
    bench = Bench()
    bench.schedulers.backlog = {"one": 3, "two": 1}
    running = asyncio.ensure_future(bench.heartbeat.run())
    try:
        await bench.events(1)
        assert bench.feed.events[0].credits == {"one": 3, "two": 1}
        bench.take(Request(record("a", choices=2, scheduler_id="one")))
        assert (await bench.event()).credits == {"one": 1, "two": 1}
        bench.heartbeat.set_accepting(False)
        assert set((await bench.event()).credits.values()) == {0}
    finally:
        await end_tasks([running])


async def test_a_scheduler_that_takes_over_from_one_that_has_left_is_granted_all() -> None:
    bench = Bench(interval_ms=1)
    bench.schedulers.backlog = {"old": 3}
    running = asyncio.ensure_future(bench.heartbeat.run())
    try:
        await bench.events(1)
        assert bench.feed.events[0].credits == {"old": SLOTS}
        bench.schedulers.backlog = {"old": None, "new": 0}
        async with asyncio.timeout(10):
            while "new" not in bench.feed.events[-1].credits:
                await asyncio.sleep(0)
        assert bench.feed.events[-1].credits == {"new": SLOTS}
    finally:
        await end_tasks([running])


@pytest.mark.parametrize("leave", ["finished", "handed_over"])
async def test_a_reply_that_leaves_is_told_at_once_with_its_last_count_and_its_slot_is_free(
    leave: str,
) -> None:
    bench = Bench()
    request = bench.take(Request(record("a"), generated=5))
    bench.take(Request(record("b"), generated=6))
    running = asyncio.ensure_future(bench.heartbeat.run())
    try:
        await bench.events(1)
        assert bench.feed.events[0].running == 2
        request.generated = 8
        getattr(bench.heartbeat, leave)("a")
        bench.in_hand.remove(request)
        await bench.events(2)
        event = bench.feed.events[1]
        assert getattr(event, leave) == ["a"]
        assert event.running == 1
        assert event.generated == {"a": 8}
    finally:
        await end_tasks([running])


def test_a_preemption_is_for_the_attempt_it_was_meant_for_L1() -> None:
    in_hand = InHand()
    request = Request(record("a", attempt=2))
    in_hand.preempt("a", 2)  # unknown yet
    in_hand.add(request)
    in_hand.preempt("a", 1)  # of an attempt that is over
    in_hand.preempt("b", 2)
    assert request.preempted == 0
    in_hand.preempt("a", 2)
    assert request.preempted == 1
    in_hand.remove(request)
    in_hand.preempt("a", 2)
    assert request.preempted == 1
