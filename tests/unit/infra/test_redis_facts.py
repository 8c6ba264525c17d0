"""What makes a Redis unfit for token streams."""

from __future__ import annotations

import pytest

from infra.redis_facts import facts_of

FIT = {"maxmemory_policy": "noeviction", "maxmemory": 0, "used_memory": 1_000, "aof_enabled": 1}


def test_a_fit_redis_has_no_warning() -> None:
    facts = facts_of(FIT)
    assert (facts.policy, facts.maxmemory_bytes, facts.used_bytes, facts.aof) == (
        "noeviction", 0, 1_000, True,
    )  # fmt: skip
    assert facts.warning is None
    assert not facts.evicts


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "volatile-lfu", "allkeys-random"])
def test_h8_every_evicting_policy_is_named_with_what_to_do(policy: str) -> None:
    facts = facts_of(FIT | {"maxmemory_policy": policy})
    assert facts.evicts
    assert facts.warning is not None
    assert policy in facts.warning
    assert "noeviction" in facts.warning


def test_a_redis_that_says_nothing_is_unknown_and_not_refused() -> None:
    facts = facts_of({})
    assert (facts.policy, facts.maxmemory_bytes, facts.aof) == ("unknown", None, None)
    assert not facts.evicts
    assert facts.warning is not None


def test_a_missing_append_only_file_and_a_memory_that_fills_up_are_said() -> None:
    assert "append-only" in (facts_of(FIT | {"aof_enabled": 0}).warning or "")
    assert "95 %" in (facts_of(FIT | {"maxmemory": 1_000, "used_memory": 950}).warning or "")
    assert facts_of(FIT | {"maxmemory": 1_000, "used_memory": 850}).warning is None
