"""The limits' counters on a real Redis: all or nothing, never more than a limit, settled once."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from contracts.identity import make_request_id
from contracts.limits import RateLimits
from infra.limits_redis import LimitCounters, LimitKind, LimitReached, LimitScope
from infra.settings import LimitSettings, Settings
from infra.stream_redis import connect

LAPSE_MS = 60_000


class Bench:
    def __init__(self, settings: Settings) -> None:
        self.client: Any = connect(settings.redis)
        self.counters = LimitCounters(self.client, 5.0)

    async def take(
        self, *scopes: LimitScope, tokens: int = 1, rid: str | None = None, ended: tuple[str, ...] = ()
    ) -> RateLimits | LimitReached:
        return await self.counters.take(rid or new_id(), scopes, tokens, LAPSE_MS, ended)

    async def counts(self) -> dict[str, Any]:
        """Every counter that is not at rest."""
        found = {}
        for key in await self.client.keys("hr:{limits}:*"):
            name = key.decode().removeprefix("hr:{limits}:")
            kind = await self.client.type(key)
            if kind == b"zset":
                value: Any = await self.client.zcard(key)
            else:
                fields = await self.client.hgetall(key)
                value = sum(int(v) for f, v in fields.items() if f not in (b"scopes", b"took"))
            if value:
                found[name] = value
        return found


@pytest.fixture
async def bench(settings: Callable[..., Settings]) -> AsyncIterator[Bench]:
    made = Bench(settings())
    yield made
    await made.client.aclose()


def new_id() -> str:
    return make_request_id(time.time_ns() // 1_000_000, secrets.token_bytes(10))


def scope(name: str = "key:a", **limits: int) -> LimitScope:
    return LimitScope(name, LimitSettings(**limits))


def reached(found: RateLimits | LimitReached) -> LimitReached:
    assert isinstance(found, LimitReached)
    return found


async def test_parallel_takes_pass_exactly_as_often_as_the_limit_says_J4(bench: Bench) -> None:
    limited = scope(requests_per_minute=20)
    results = await asyncio.gather(*(bench.take(limited) for _ in range(200)))
    assert sum(isinstance(r, RateLimits) for r in results) == 20
    refused = [r for r in results if isinstance(r, LimitReached)]
    assert {r.kind for r in refused} == {LimitKind.REQUESTS_PER_MINUTE}
    assert all(r.retry_ms is not None and 59_000 < r.retry_ms <= 61_000 for r in refused)
    assert all(r.rate_limits.requests is not None for r in refused)
    assert {r.rate_limits.requests.remaining for r in refused if r.rate_limits.requests} == {0}


async def test_a_refusal_of_one_scope_takes_nothing_of_the_others_J5(bench: Bench) -> None:
    key, tier = scope(requests_per_minute=5, concurrent=9), scope("tier:free", tokens_per_day=10)
    assert isinstance(await bench.take(key, tier, tokens=10), RateLimits)
    before = await bench.counts()
    assert reached(await bench.take(key, tier, tokens=1)).kind is LimitKind.TOKENS_PER_DAY
    assert await bench.counts() == before


async def test_every_key_has_a_lifetime_J8(bench: Bench) -> None:
    everything = scope(
        requests_per_minute=5,
        tokens_per_minute=50,
        concurrent=5,
        requests_per_day=5,
        tokens_per_day=50,
        enqueued_tokens=50,
    )
    await bench.take(everything, tokens=3)
    keys = await bench.client.keys("*")
    assert len(keys) == 8
    assert all([await bench.client.pttl(key) > 0 for key in keys])


async def test_tokens_are_settled_once_with_what_was_used_J11(bench: Bench) -> None:
    limited = scope(tokens_per_minute=100, tokens_per_day=1_000, concurrent=1)
    rid = new_id()
    found = await bench.take(limited, tokens=90, rid=rid)
    assert isinstance(found, RateLimits)
    assert found.tokens is not None
    assert found.tokens.remaining == 10
    assert await bench.counters.settle(rid, 25)
    assert not await bench.counters.settle(rid, 25)
    assert await bench.counts() == {"key:a:t": 25, "key:a:d": 26}
    assert isinstance(await bench.take(limited, tokens=75), RateLimits)


async def test_what_was_never_accepted_leaves_nothing_J2(bench: Bench) -> None:
    scopes = [scope(requests_per_minute=5, concurrent=5), scope("tenant:t", tokens_per_day=50)]
    rid = new_id()
    await bench.take(*scopes, tokens=7, rid=rid)
    await bench.counters.undo(rid)
    assert await bench.counts() == {}


async def test_a_take_whose_answer_was_lost_counts_once(bench: Bench) -> None:
    limited = scope(requests_per_minute=2)
    rid = new_id()
    for _ in range(5):
        assert isinstance(await bench.take(limited, rid=rid), RateLimits)
    counts = await bench.counts()
    assert (counts["key:a:r"], counts["unsettled"]) == (1, 1)


async def test_permits_are_given_back_by_whoever_sees_that_they_ended_J1(bench: Bench) -> None:
    limited = scope(concurrent=2)
    first, second = new_id(), new_id()
    await bench.take(limited, rid=first)
    await bench.take(limited, rid=second)
    full = reached(await bench.take(limited))
    assert full.kind is LimitKind.CONCURRENT
    assert set(full.held) == {first, second}
    assert isinstance(await bench.take(limited, ended=(first,)), RateLimits)
    assert reached(await bench.take(limited)).kind is LimitKind.CONCURRENT


async def test_every_full_scope_names_the_requests_that_fill_it_J1(bench: Bench) -> None:
    own, other = scope(concurrent=1), scope("key:b", concurrent=1)
    tier = scope("tier:free", concurrent=2)
    first, second = new_id(), new_id()
    await bench.take(own, tier, rid=first)
    await bench.take(other, tier, rid=second)
    assert sorted(reached(await bench.take(own, tier)).held) == sorted([first, second])
    assert isinstance(await bench.take(own, tier, ended=(first, second)), RateLimits)


async def test_nobody_is_looked_for_where_only_time_brings_room(bench: Bench) -> None:
    limited = scope(concurrent=1, requests_per_minute=1)
    await bench.take(limited)
    full = reached(await bench.take(limited))
    assert (full.kind, full.held) == (LimitKind.REQUESTS_PER_MINUTE, ())


async def test_batches_and_other_requests_of_a_tenant_do_not_fill_each_other_s_room_J13(
    bench: Bench,
) -> None:
    chats, batches = scope("tenant:t", concurrent=2), scope("tenant:t", enqueued_tokens=100)
    for _ in range(10):
        assert isinstance(await bench.take(batches, tokens=10), RateLimits)
    for _ in range(2):
        assert isinstance(await bench.take(chats, tokens=500), RateLimits)
    assert reached(await bench.take(chats)).kind is LimitKind.CONCURRENT
    assert reached(await bench.take(batches)).kind is LimitKind.ENQUEUED_TOKENS


async def test_a_settlement_leaves_alone_what_its_request_has_not_taken(bench: Bench) -> None:
    """Limits may have come since, and a tenant's batches take nothing of its minutes."""
    first, second = new_id(), new_id()
    await bench.take(scope(enqueued_tokens=100), tokens=90, rid=first)
    await bench.take(scope(tokens_per_minute=100, tokens_per_day=100), tokens=50, rid=second)
    await bench.counters.settle(first, 1)
    counts = await bench.counts()
    assert (counts["key:a:t"], counts["key:a:d"]) == (50, 51)


async def test_a_permit_lapses_though_every_process_died_J1(bench: Bench) -> None:
    limited = scope(concurrent=1)
    await bench.counters.take(new_id(), [limited], 1, 150)

    async def free() -> bool:
        return isinstance(await bench.take(limited), RateLimits)

    async with asyncio.timeout(5):
        while not await free():
            await asyncio.sleep(0.02)


async def test_a_batch_is_bounded_by_the_tokens_it_has_not_finished_J13(bench: Bench) -> None:
    limited = scope("tier:batch", enqueued_tokens=100)
    ids = [new_id() for _ in range(4)]
    for rid in ids:
        assert isinstance(await bench.take(limited, tokens=25, rid=rid), RateLimits)
    assert reached(await bench.take(limited, tokens=25)).kind is LimitKind.ENQUEUED_TOKENS
    await bench.counters.settle(ids[0], 3)
    assert isinstance(await bench.take(limited, tokens=25), RateLimits)


async def test_what_never_fits_is_told_so(bench: Bench) -> None:
    for limits in ({"tokens_per_minute": 10}, {"enqueued_tokens": 10}, {"tokens_per_day": 10}):
        assert reached(await bench.take(scope(**limits), tokens=11)).retry_ms is None


async def test_the_day_begins_anew_at_midnight_utc_J7(bench: Bench) -> None:
    limited = scope(requests_per_day=1)
    await bench.take(limited)
    again = reached(await bench.take(limited))
    seconds, _ = await bench.client.time()
    left = 86_400 - seconds % 86_400
    assert again.retry_ms is not None
    assert abs(again.retry_ms / 1000 - left) <= 2


async def test_a_bucket_counts_until_all_of_it_is_a_minute_old_J7(bench: Bench) -> None:
    limited = scope(requests_per_minute=3)
    await bench.take(limited)
    seconds, _ = await bench.client.time()
    # As if two had been taken 60 s ago, and one longer ago.
    await bench.client.hset("hr:{limits}:key:a:r", mapping={seconds - 59: 2, seconds - 63: 1})
    found = reached(await bench.take(limited))
    assert found.retry_ms is not None
    assert 0 < found.retry_ms <= 2_000


async def test_forgotten_scripts_are_sent_again_H5(bench: Bench) -> None:
    limited = scope(requests_per_minute=2)
    await bench.take(limited)
    await bench.client.script_flush()
    assert isinstance(await bench.take(limited), RateLimits)
    assert isinstance(await bench.take(limited), LimitReached)


_steps = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=12)


@given(steps=_steps)
@hypothesis_settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_counters_are_the_sum_of_what_was_used_and_is_reserved(
    bench: Bench, steps: list[tuple[int, int]]
) -> None:
    await bench.client.flushdb()
    limited = scope(tokens_per_minute=100, enqueued_tokens=60)
    total, held = 0, 0
    for tokens, used in steps:
        rid = new_id()
        found = await bench.take(limited, tokens=tokens, rid=rid)
        fits = total + tokens <= 100 and held + tokens <= 60
        assert isinstance(found, RateLimits) is fits
        if not fits:
            continue
        if used % 3:
            await bench.counters.settle(rid, used)
            total += used
        else:
            total, held = total + tokens, held + tokens
    counts = await bench.counts()
    assert counts.get("key:a:t", 0) == total
    assert counts.get("key:a:h", 0) == 2 * held


async def test_a_key_that_has_lost_its_lifetime_gets_one_again_J8(bench: Bench) -> None:
    limited = scope(requests_per_minute=5, tokens_per_minute=50, concurrent=5, enqueued_tokens=50)
    await bench.take(limited)
    shared = [k for k in await bench.client.keys("*") if b":taken:" not in k]
    for key in shared:
        await bench.client.persist(key)
    await bench.take(limited)
    assert all([await bench.client.pttl(key) > 0 for key in shared])
