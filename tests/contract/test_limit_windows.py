"""The limits' scripts under a clock in the test's hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from infra import limits_redis
from infra.limits_redis import LimitCounters, LimitKind, LimitReached, LimitScope
from infra.settings import LimitSettings, Settings
from infra.stream_redis import connect

#: One in the morning, UTC.
START_MS = 20_000 * 86_400_000 + 3_600_000
LAPSE_MS = 10_000_000
BY_TIME = (LimitKind.REQUESTS_PER_MINUTE, LimitKind.TOKENS_PER_MINUTE)


class Clocked:
    """Counters whose script reads the time from a list."""

    def __init__(self, settings: Settings) -> None:
        self.client: Any = connect(settings.redis)
        self.counters = LimitCounters(self.client, 5.0)

    async def at(self, now_ms: int) -> None:
        async with self.client.pipeline(transaction=True) as pipe:
            pipe.delete("clock")
            pipe.rpush("clock", now_ms // 1000, now_ms % 1000 * 1000)
            await pipe.execute()

    async def state(self) -> dict[bytes, Any]:
        """Everything that is counted, and the fields of each."""
        found: dict[bytes, Any] = {}
        for key in await self.client.keys("hr:*"):
            assert await self.client.pttl(key) > 0, key
            is_set = await self.client.type(key) == b"zset"
            found[key] = (
                dict(await self.client.zrange(key, 0, -1, withscores=True))
                if is_set
                else await self.client.hgetall(key)
            )
        return found


@pytest.fixture
async def clocked(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Clocked]:
    script = limits_redis._TAKE
    assert script.count("redis.call('TIME')") == 1
    monkeypatch.setattr(
        limits_redis,
        "_TAKE",
        script.replace("redis.call('TIME')", "redis.call('LRANGE', 'clock', 0, -1)"),
    )
    made = Clocked(settings())
    yield made
    await made.client.aclose()


@dataclass
class Taken:
    at_ms: int
    tokens: int
    settled: bool = False


_steps = st.lists(
    st.tuples(
        st.integers(0, 40_000), st.sampled_from(["take", "take", "settle", "undo"]), st.integers(0, 60)
    ),
    min_size=1,
    max_size=25,
)


@given(
    steps=_steps,
    requests=st.integers(1, 4),
    tokens=st.integers(1, 100),
    of_tenant=st.integers(1, 5),
    concurrent=st.one_of(st.none(), st.integers(1, 3)),
    enqueued=st.one_of(st.none(), st.integers(1, 90)),
)
@hypothesis_settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
async def test_no_minute_has_more_than_its_limit_and_a_refusal_leaves_no_trace_J5_J7_J8(
    clocked: Clocked,
    steps: list[tuple[int, str, int]],
    requests: int,
    tokens: int,
    of_tenant: int,
    concurrent: int | None,
    enqueued: int | None,
) -> None:
    await clocked.client.flushdb()
    own = LimitSettings(
        requests_per_minute=requests,
        tokens_per_minute=tokens,
        concurrent=concurrent,
        enqueued_tokens=enqueued,
    )
    scopes = [
        LimitScope("key:k", own),
        LimitScope("tenant:t", LimitSettings(requests_per_minute=of_tenant)),
    ]
    taken: dict[str, Taken] = {}
    now_ms = START_MS
    for number, (later_ms, what, amount) in enumerate(steps):
        now_ms += later_ms
        await clocked.at(now_ms)
        running = {rid: one for rid, one in taken.items() if not one.settled}
        if what == "take":
            before = await clocked.state()
            found = await clocked.counters.take(f"r{number}", scopes, amount, LAPSE_MS)
            if not isinstance(found, LimitReached):
                taken[f"r{number}"] = Taken(now_ms, amount)
            else:
                after = await clocked.state()
                assert all(fields.items() <= before[key].items() for key, fields in after.items())
                if found.kind in BY_TIME and found.retry_ms is not None:
                    await clocked.at(now_ms + found.retry_ms)
                    again = await clocked.counters.take("again", scopes, amount, LAPSE_MS)
                    assert not isinstance(again, LimitReached) or again.kind not in BY_TIME
                    return
        elif running:
            rid = sorted(running)[amount % len(running)]
            if what == "undo":
                assert await clocked.counters.undo(rid)
                del taken[rid]
            else:
                used = min(amount, taken[rid].tokens)
                assert await clocked.counters.settle(rid, used)
                taken[rid] = Taken(taken[rid].at_ms, used, settled=True)
            before = await clocked.state()
            assert not await clocked.counters.settle(rid, 99)
            assert not await clocked.counters.undo(rid)
            assert await clocked.state() == before
        for end in taken.values():
            minute = [one for one in taken.values() if end.at_ms - 60_000 < one.at_ms <= end.at_ms]
            assert len(minute) <= min(requests, of_tenant)
            assert sum(one.tokens for one in minute) <= tokens
        running_now = [one.tokens for one in taken.values() if not one.settled]
        assert concurrent is None or len(running_now) <= concurrent
        assert enqueued is None or sum(running_now) <= enqueued


async def test_a_reset_is_the_time_at_which_all_is_there_again_J7(clocked: Clocked) -> None:
    scopes = [LimitScope("key:k", LimitSettings(requests_per_minute=3))]
    await clocked.at(START_MS + 250)
    await clocked.counters.take("a", scopes, 1, LAPSE_MS)
    await clocked.at(START_MS + 20_300)
    found = await clocked.counters.take("b", scopes, 1, LAPSE_MS)
    assert not isinstance(found, LimitReached)
    assert found.requests is not None
    for early_ms, left in ((1_100, 1), (0, 2)):
        await clocked.at(START_MS + 20_300 + int(found.requests.reset_seconds * 1000) - early_ms)
        then = await clocked.counters.take("c", scopes, 1, LAPSE_MS)
        assert not isinstance(then, LimitReached)
        assert then.requests is not None
        assert then.requests.remaining == left
        await clocked.counters.undo("c")


async def test_the_day_begins_anew_at_midnight_and_yesterday_s_are_settled_in_yesterday(
    clocked: Clocked,
) -> None:
    scopes = [LimitScope("key:k", LimitSettings(requests_per_day=1, tokens_per_day=100))]
    await clocked.at(START_MS)
    await clocked.counters.take("a", scopes, 90, LAPSE_MS)
    refused = await clocked.counters.take("b", scopes, 1, LAPSE_MS)
    assert isinstance(refused, LimitReached)
    assert refused.retry_ms == 23 * 3_600_000
    await clocked.at(START_MS + refused.retry_ms)
    assert not isinstance(await clocked.counters.take("b", scopes, 80, LAPSE_MS), LimitReached)
    await clocked.counters.settle("a", 10)
    day = (await clocked.state())[b"hr:{limits}:key:k:d"]
    assert day == {b"20000:r": b"1", b"20000:t": b"10", b"20001:r": b"1", b"20001:t": b"80"}
