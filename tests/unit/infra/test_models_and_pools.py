"""Several models in one configuration: what fits together, and what a stack makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from infra.settings import SettingsError, development, parse
from infra.stack.policy import RoleHealth, pipeline_gap
from infra.stack.units import role_units


def with_models(**models: dict[str, Any]) -> dict[str, Any]:
    raw = development("sim").model_dump(mode="json")
    raw["models"] = {name: {"path": "builtin:sim", **model} for name, model in models.items()}
    return raw


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({"a": {"fallback": "c"}}, r"models\.a\.fallback: there is no model c"),
        ({"a": {"fallback": "a"}}, r"models\.a\.fallback: a -> a is a cycle"),
        (
            {"a": {"fallback": "b"}, "b": {"fallback": "c"}, "c": {"fallback": "b"}},
            r"models\.a\.fallback: .* is a cycle",
        ),
        (
            {"a": {"fallback": "b"}, "b": {"tiers": ["paid"]}},
            r"models\.a\.fallback: tier free may use a and not b",
        ),
        (
            {"a": {}, "b": {"path": "/elsewhere"}},
            r"models\.b\.pool: the pool default serves models\.a with another path",
        ),
        ({"a": {}, "b": {"revision": "2"}}, r"models\.b\.pool: .* with another revision"),
        ({"a": {}, "b": {"aliases": ["a"]}}, r"models\.b: the name a is taken by a"),
        ({"a": {"tiers": ["gold"]}}, r"models\.a\.tiers: there is no tier gold"),
    ],
)
def test_models_that_do_not_fit_are_an_error_that_names_the_key(
    models: dict[str, dict[str, Any]], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        parse(with_models(**models))


def test_an_alias_is_no_fallback() -> None:
    """The reply's ``model`` says what ran, so the file does too."""
    with pytest.raises(SettingsError, match=r"models\.a\.fallback: there is no model small"):
        parse(with_models(a={"fallback": "small"}, b={"aliases": ["small"]}))


def test_a_chain_of_fallbacks_and_two_names_for_the_same_weights_are_fine() -> None:
    made = parse(
        with_models(
            large={"pool": "large", "fallback": "medium", "tiers": ["paid"]},
            medium={"pool": "medium", "fallback": "small"},
            small={"pool": "small"},
            short={"pool": "small", "context_length": 512},
        )
    )
    assert made.pools == ["large", "medium", "small"]


async def test_a_stack_starts_so_many_workers_of_each_pool_with_indices_of_their_own() -> None:
    settings = parse(with_models(a={"pool": "large"}, b={"pool": "small"}))
    async with aiohttp.ClientSession() as http:
        units = role_units(settings, Path("s.json"), Path("stack.json"), 2, http, {})
    workers = [(u.index, u.pool, u.command(1).argv) for u in units if u.name == "worker"]
    assert [(index, pool) for index, pool, _ in workers] == [
        (0, "large"),
        (1, "large"),
        (2, "small"),
        (3, "small"),
    ]
    for _, pool, argv in workers:
        assert argv[argv.index("--pool") + 1] == pool
    assert all(u.pool is None for u in units if u.name != "worker")


def test_one_worker_of_each_pool_is_enough_and_a_pool_without_one_is_named() -> None:
    roles = [RoleHealth(name, 0, True, None) for name in ("moderation", "scheduler", "edge")]
    large = RoleHealth("worker", 0, True, None, "large")
    loading = RoleHealth("worker", 1, False, "loading", "small")
    small = RoleHealth("worker", 2, True, None, "small")
    assert pipeline_gap([*roles, large, loading, small]) is None
    assert pipeline_gap([*roles, large, loading]) == "no worker of pool small is ready (loading)"
