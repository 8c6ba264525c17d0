"""What the KV tier's reports become: metrics, and news for the schedulers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from kv.tally import Tally
from kv.tier import OFFLOAD_EVENTS
from workers.protocols import TierNews
from workers.tier_reports import TierReports

prefixes = st.dictionaries(st.sampled_from([f"{i:02x}" for i in range(20)]), st.booleans())


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"headrace_kv_{name}", labels) or 0.0


@pytest.mark.parametrize(
    ("counted", "name", "labels"),
    [
        ("lookups", "lookups_total", {}),
        ("lookup_seconds", "lookup_seconds_total", {}),
        ("load_seconds", "load_seconds_total", {}),
        ("loaded_bytes", "bytes_total", {"direction": "loaded"}),
        ("saved_bytes", "bytes_total", {"direction": "saved"}),
        ("looked_up_tokens", "tokens_total", {"what": "looked_up"}),
        ("hit_tokens", "tokens_total", {"what": "hit"}),
        ("computed_instead_tokens", "tokens_total", {"what": "computed_instead"}),
        ("lookup_failed_timeout", "failures_total", {"operation": "lookup", "reason": "timeout"}),
        ("load_failed_evicted", "failures_total", {"operation": "load", "reason": "evicted"}),
        ("save_dropped_full", "failures_total", {"operation": "save", "reason": "full"}),
    ],
)
def test_each_count_is_a_metric(counted: str, name: str, labels: dict[str, str]) -> None:
    before = metric(name, **labels)
    reports = TierReports()
    for amount in (2, 0.5):
        reports.take_in({"counts": {counted: amount}})
    assert metric(name, **labels) - before == 2.5
    assert reports.counts == {counted: 2.5}


def test_a_count_without_a_metric_is_only_counted() -> None:
    reports = TierReports()
    reports.take_in({"counts": {"saved_chunks": 3}})
    assert reports.counts == {"saved_chunks": 3}


@settings(deadline=None)
@given(prefixes)
def test_prefixes_are_told_once_each_as_held_or_missing(held: dict[str, bool]) -> None:
    reports = TierReports()
    reports.take_in({"held": held})
    news = reports.take_news(100)
    assert news.held == [prefix for prefix, yes in held.items() if yes]
    assert news.missing == [prefix for prefix, yes in held.items() if not yes]
    assert reports.take_news(100) == TierNews([], [])


@settings(deadline=None)
@given(st.lists(prefixes, max_size=5), st.integers(1, 7))
def test_news_come_in_pieces_in_which_the_latest_word_counts(
    reported: list[dict[str, bool]], limit: int
) -> None:
    reports = TierReports()
    expected: dict[str, bool] = {}
    for held in reported:
        reports.take_in({"held": held})
        expected = {k: v for k, v in expected.items() if k not in held} | held
    told: list[tuple[str, bool]] = []
    while (news := reports.take_news(limit)).held or news.missing:
        assert len(news.held) + len(news.missing) <= limit
        piece = dict.fromkeys(news.held, True) | dict.fromkeys(news.missing, False)
        assert len(piece) == len(news.held) + len(news.missing)
        told += piece.items()
    assert dict(told) == expected
    assert len(told) == len(expected)
    for at in range(0, len(told), limit):
        assert {name for name, _ in told[at : at + limit]} == set(list(expected)[at : at + limit])


def test_of_many_that_wait_the_oldest_are_dropped() -> None:
    reports = TierReports()
    reports.take_in({"held": {f"{i:04x}": True for i in range(5_000)}})
    reports.take_in({"held": {f"{4_999:04x}": False}})
    news = reports.take_news(10_000)
    assert (len(news.held), len(news.missing)) == (4_095, 1)
    assert f"{0:04x}" not in news.held


def test_rates_stay_until_there_are_others() -> None:
    reports = TierReports()
    assert reports.take_news(1) == TierNews([], [], None, None)
    reports.take_in({"rates": (None, 20.0)})
    reports.take_in({"counts": {"lookups": 1}})
    assert reports.take_news(1) == TierNews([], [], None, 20.0)
    reports.take_in({"rates": (5.0, 21.0)})
    for _ in range(2):
        assert reports.take_news(1) == TierNews([], [], 5.0, 21.0)
    assert metric("us_per_token", what="load") == 5.0
    assert metric("us_per_token", what="prefill") == 21.0


def test_what_a_tally_takes_can_be_taken_in() -> None:
    tally, reports = Tally(), TierReports()
    tally.add("lookups")
    tally.held([b"\1" * 16])
    tally.held([b"\2" * 16], yes=False)
    tally.rates(1.5, None)
    taken: dict[str, Any] = tally.take()
    reports.take_in(taken)
    reports.take_in(tally.take())
    assert reports.counts == {"lookups": 1}
    assert reports.take_news(9) == TierNews(["01" * 16], ["02" * 16], 1.5, None)


def test_events_of_the_tier_below_vllms_offloading_are_counted_alike() -> None:
    reports = TierReports()
    before = metric("failures_total", operation="load", reason="checksum")
    events = {("load_failed_checksum",): 2.0, ("saved_bytes",): 10.0}
    reports.take_in({"types": {}, "data": {OFFLOAD_EVENTS: events, "vllm:other": {(): 1}}})
    assert reports.counts == {"load_failed_checksum": 2.0, "saved_bytes": 10.0}
    after = metric("failures_total", operation="load", reason="checksum")
    assert after - before == 2
