"""Counts and news of the tier: nothing lost, nothing twice, and never too much."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv import tally as tally_module
from kv.tally import Tally, added

counts = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=20)
news = st.lists(st.tuples(st.binary(min_size=1, max_size=1), st.booleans()), max_size=20)


def filled(counted: list[tuple[str, int]], told: list[tuple[bytes, bool]]) -> Tally:
    tally = Tally()
    for name, amount in counted:
        tally.add(name, amount)
    for prefix, yes in told:
        tally.held([prefix], yes)
    return tally


def test_nothing_happened_is_an_empty_report() -> None:
    assert Tally().take() == {}


@settings(deadline=None)
@given(counts, news)
def test_a_report_says_what_was_counted_and_the_latest_word_of_each_prefix(
    counted: list[tuple[str, int]], told: list[tuple[bytes, bool]]
) -> None:
    tally = filled(counted, told)
    report = tally.take()
    expected: Counter[str] = Counter()
    for name, amount in counted:
        expected[name] += amount
    assert report.get("counts", {}) == expected
    assert report.get("held", {}) == {prefix.hex(): yes for prefix, yes in told}
    assert tally.take() == {}


@settings(deadline=None)
@given(counts, counts, news, news)
def test_two_reports_added_are_the_report_of_both(
    counted: list[tuple[str, int]],
    more: list[tuple[str, int]],
    told: list[tuple[bytes, bool]],
    later: list[tuple[bytes, bool]],
) -> None:
    both = added(filled(counted, told).take(), filled(more, later).take())
    at_once = filled(counted + more, told + later).take()
    assert both["counts"] == at_once.get("counts", {})
    assert both["held"] == at_once.get("held", {})
    assert list(both["held"]) == list(at_once.get("held", {})), "the oldest comes first"


def test_reports_added_to_nothing_are_themselves() -> None:
    tally = filled([("a", 2)], [(b"p", True)])
    tally.rates(1.0, 2.0)
    report = tally.take()
    assert added(report, {}) == added({}, report) == report


def test_the_oldest_prefixes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally_module, "NEWS", 3)
    tally = filled([], [(b"\1", True), (b"\2", True), (b"\3", True), (b"\1", False), (b"\4", True)])
    report = tally.take()
    assert report["held"] == {"03": True, "01": False, "04": True}
    assert added(report, {"held": {"03": False, "05": True}})["held"] == {
        "04": True, "03": False, "05": True,
    }  # fmt: skip


def test_there_are_no_more_prefixes_than_a_report_may_have() -> None:
    tally = Tally()
    tally.held(i.to_bytes(2, "big") for i in range(3_000))
    assert len(tally.take()["held"]) == tally_module.NEWS


def rates_told(tally: Tally, load: float | None, prefill: float | None) -> Any:
    tally.rates(load, prefill)
    return tally.take().get("rates")


def test_rates_are_told_when_they_have_changed() -> None:
    tally = Tally()
    assert rates_told(tally, None, None) is None
    assert rates_told(tally, None, 10.0) == (None, 10.0)
    assert rates_told(tally, 100.0, 10.0) == (100.0, 10.0)
    assert rates_told(tally, 104.0, 10.4) is None
    assert rates_told(tally, 106.0, 10.4) == (106.0, 10.4)
    assert rates_told(tally, 106.0, 9.0) == (106.0, 9.0)


def test_the_later_rates_count() -> None:
    one, other = {"rates": (1.0, 2.0)}, {"rates": (3.0, 4.0)}
    assert added(one, other)["rates"] == (3.0, 4.0)
    assert added(one, {"counts": {"a": 1}})["rates"] == (1.0, 2.0)
    assert "rates" not in added({}, {})


def test_threads_lose_no_count() -> None:
    tally = Tally()

    def work(thread: int) -> list[dict[str, Any]]:
        taken = []
        for i in range(500):
            tally.add("a")
            tally.held([bytes([thread])], i % 2 == 1)
            if i % 50 == 0:
                taken.append(tally.take())
        return taken

    with ThreadPoolExecutor(8) as threads:
        reports = [report for taken in threads.map(work, range(8)) for report in taken]
    total: dict[str, Any] = {}
    for report in [*reports, tally.take()]:
        total = added(total, report)
    assert total["counts"] == {"a": 4_000}
