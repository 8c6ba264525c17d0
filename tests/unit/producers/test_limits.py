"""Whose limits a caller has, what a request reserves, and what is told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.identity import Principal
from contracts.limits import Allowance, RateLimits
from infra.settings import Settings, development, parse
from producers.chat_request import parse_chat_request
from producers.limit_headers import duration, limit_headers
from producers.limits import LocalBound, longest_life, most_tokens, scopes_of

PAID = Principal(key_id="dev", tenant="dev", tier="paid")


def with_limits(**changes: Any) -> Settings:
    raw = development("sim").model_dump(mode="json")
    raw["tiers"]["paid"] |= changes.pop("paid", {})
    raw["keys"][0] |= changes.pop("key", {})
    return parse(raw | changes)


def test_nobody_has_limits_where_none_are_set() -> None:
    settings = development("sim")
    assert not settings.has_limits
    assert scopes_of(settings, PAID) == []


def test_a_key_has_its_tier_s_limits_unless_it_has_its_own() -> None:
    tier = {"limits": {"concurrent": 2}, "tier_limits": {"tokens_per_minute": 9}}
    settings = with_limits(paid=tier, tenants={"dev": {"limits": {"requests_per_day": 5}}})
    found = {
        scope.name: scope.limits.model_dump(exclude_none=True) for scope in scopes_of(settings, PAID)
    }
    assert found == {
        "key:dev": {"concurrent": 2},
        "tier:paid": {"tokens_per_minute": 9},
        "tenant:dev": {"requests_per_day": 5},
    }
    own = with_limits(paid=tier, key={"limits": {"requests_per_minute": 1}})
    assert scopes_of(own, PAID)[0].limits.model_dump(exclude_none=True) == {"requests_per_minute": 1}
    free_of_them = with_limits(paid={"limits": {"concurrent": 2}}, key={"limits": {}})
    assert scopes_of(free_of_them, PAID) == []


def test_a_tenant_s_batches_have_their_quota_and_the_rest_its_limits_per_minute_J13() -> None:
    limits = {
        "requests_per_minute": 60,
        "tokens_per_minute": 9_000,
        "concurrent": 5,
        "enqueued_tokens": 1_000_000,
        "tokens_per_day": 7,
    }
    settings = with_limits(tenants={"dev": {"limits": limits}})
    (chats,) = scopes_of(settings, PAID)
    (batches,) = scopes_of(settings, Principal(key_id="dev", tenant="dev", tier="batch"))
    of_both = {"tokens_per_day": 7}
    assert batches.limits.model_dump(exclude_none=True) == of_both | {"enqueued_tokens": 1_000_000}
    assert chats.limits.model_dump(exclude_none=True) == {
        name: limit for name, limit in limits.items() if name != "enqueued_tokens"
    }


def test_a_key_s_lines_take_nothing_of_what_its_calls_have_J13() -> None:
    lines = Principal(key_id="dev", tenant="dev", tier="batch")
    own = {"requests_per_minute": 1, "concurrent": 2, "tokens_per_day": 7, "enqueued_tokens": 9}
    settings = with_limits(key={"limits": own})
    (calls,), (batches,) = scopes_of(settings, PAID), scopes_of(settings, lines)
    assert calls.name != batches.name
    assert batches.limits.model_dump(exclude_none=True) == {"tokens_per_day": 7, "enqueued_tokens": 9}
    raw = development("sim").model_dump(mode="json")["tiers"]
    raw["batch"]["limits"] = {"concurrent": 3}
    (of_tier,) = scopes_of(with_limits(tiers=raw), lines)
    assert (of_tier.name, of_tier.limits.concurrent) == (batches.name, 3)


def test_a_request_may_live_as_long_as_overload_lets_it_wait_and_its_stream_be_written_J1() -> None:
    settings = with_limits(overload={"wait_factor": 3.0}, streams={"open_ttl_seconds": 1_000})
    assert longest_life(settings, settings.tiers["free"]) == 3 * 120 + 1_000
    assert longest_life(settings, settings.tiers["paid"]) == 60 + 1_000


@given(text=st.text(max_size=300), n=st.integers(1, 4), limit=st.one_of(st.none(), st.integers(1, 500)))
def test_a_request_reserves_its_prompt_and_all_its_output(text: str, n: int, limit: int | None) -> None:
    settings = development("sim")
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": text}],
        "n": n,
        "max_tokens": limit,
    }
    request = parse_chat_request(body, settings, PAID)
    tokens = most_tokens(request, request.messages)
    output = n * (limit if limit is not None else request.model_settings.default_max_tokens)
    assert output < tokens <= output + len(text.encode()) + 8


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0s"), (0.2, "1s"), (59.1, "1m0s"), (60, "1m0s"), (366, "6m6s")]
)
def test_durations_are_written_as_the_openai_api_writes_them_J7(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_only_limits_that_there_are_make_headers() -> None:
    assert limit_headers(RateLimits()) == {}
    assert limit_headers(RateLimits(tokens=Allowance(100, 40, 12.5))) == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "40",
        "x-ratelimit-reset-tokens": "13s",
    }


@given(gaps=st.lists(st.floats(0, 90), min_size=1, max_size=60), per_minute=st.integers(1, 20))
def test_the_local_bound_lets_no_minute_have_more_than_twice_its_rate(
    gaps: list[float], per_minute: int
) -> None:
    bound, now, taken = LocalBound(), 0.0, []
    for gap in gaps:
        now += gap
        if bound.take("k", per_minute, now) == 0:
            taken.append(now)
    for at in taken:
        assert sum(at <= t < at + 60 for t in taken) <= 2 * per_minute
    assert taken[0] == gaps[0]


def test_the_local_bound_says_when_the_next_one_passes() -> None:
    bound = LocalBound()
    assert bound.take("k", 60, 0.0) == 0
    waits = [bound.take("k", 60, 0.0) for _ in range(60)]
    assert waits[:59] == [0] * 59
    assert waits[59] == pytest.approx(1.0)
    assert bound.take("k", 60, 1.0) == 0
    assert bound.take("other", 60, 0.0) == 0
