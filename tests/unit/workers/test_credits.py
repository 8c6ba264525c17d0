"""A worker's free slots, divided among schedulers (L4)."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.credits import CreditLedger, shares

HOLD_MS = 100
backlogs = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 1_000), max_size=5)


@settings(deadline=None)
@given(st.integers(0, 64), backlogs)
def test_shares_are_all_that_is_free_and_one_for_each_while_there_are_any(
    free: int, backlog: dict[str, int]
) -> None:
    found = shares(free, backlog)
    assert found.keys() == backlog.keys()
    assert sum(found.values()) == (free if backlog else 0)
    assert sum(slots > 0 for slots in found.values()) >= min(free, len(backlog))


@settings(deadline=None)
@given(st.integers(0, 64), backlogs)
def test_shares_do_not_depend_on_the_order_in_which_schedulers_are_seen(
    free: int, backlog: dict[str, int]
) -> None:
    assert shares(free, backlog) == shares(free, dict(reversed(backlog.items())))


@settings(deadline=None)
@given(st.integers(0, 64), backlogs)
def test_more_backlog_gives_no_smaller_share(free: int, backlog: dict[str, int]) -> None:
    found = shares(free, backlog)
    for one in backlog:
        assert all(found[one] >= found[other] for other in backlog if backlog[one] > backlog[other])


def test_shares_follow_the_backlog() -> None:
    assert shares(12, {"a": 30, "b": 10}) == {"a": 9, "b": 3}
    assert shares(4, {"a": 0, "b": 0}) == {"a": 2, "b": 2}
    assert shares(1, {"a": 1, "b": 5}) == {"a": 0, "b": 1}


def test_one_scheduler_has_all_that_is_free_at_once() -> None:
    ledger = CreditLedger(HOLD_MS)
    assert ledger.grant(8, {"a": 3}, 0) == {"a": 8}
    ledger.taken("a", 5)
    assert ledger.grant(3, {"a": 3}, 1) == {"a": 3}
    assert ledger.grant(4, {"a": 3}, 2) == {"a": 4}


def test_who_knows_no_scheduler_grants_nothing_by_name() -> None:
    assert CreditLedger(HOLD_MS).grant(8, {}, 0) == {}


def test_equal_input_gives_equal_grants() -> None:
    ledger = CreditLedger(HOLD_MS)
    first = ledger.grant(7, {"a": 5, "b": 2}, 0)
    assert sum(first.values()) == 7
    assert ledger.grant(7, {"a": 5, "b": 2}, 10) == first


def test_what_one_no_longer_needs_goes_to_the_other_when_it_can_no_longer_be_used() -> None:
    ledger = CreditLedger(HOLD_MS)
    assert ledger.grant(8, {"a": 9}, 0) == {"a": 8}
    assert ledger.grant(8, {"a": 0, "b": 9}, 10) == {"a": 1, "b": 0}
    assert ledger.grant(8, {"a": 0, "b": 9}, 9 + HOLD_MS) == {"a": 1, "b": 0}
    assert ledger.grant(8, {"a": 0, "b": 9}, 10 + HOLD_MS) == {"a": 1, "b": 7}


def test_the_slots_of_a_scheduler_that_has_left_come_back_at_once() -> None:
    ledger = CreditLedger(HOLD_MS)
    ledger.grant(8, {"a": 1}, 0)
    ledger.forget("a")
    ledger.forget("unknown")
    assert ledger.grant(8, {"b": 1}, 10) == {"b": 8}


def test_the_slots_of_a_scheduler_that_fell_silent_come_back() -> None:
    ledger = CreditLedger(HOLD_MS)
    ledger.grant(8, {"a": 1}, 0)
    assert ledger.grant(8, {"b": 1}, 10) == {"b": 0}
    assert ledger.grant(8, {"b": 1}, 10 + HOLD_MS) == {"b": 8}


@dataclass
class Dispatcher:
    """A scheduler that gives all it may; its way to the worker and back takes up to half the hold time."""

    name: str
    granted: int = 0
    untaken: int = 0
    reports: list[tuple[int, int, int]] = field(default_factory=list)
    dispatches: list[tuple[int, int]] = field(default_factory=list)

    def hear(self, after_ms: int) -> None:
        while self.reports and self.reports[0][0] <= after_ms:
            _, self.granted, taken = self.reports.pop(0)
            self.untaken -= taken

    def dispatch(self, now_ms: int) -> None:
        choices = self.granted - self.untaken
        if choices > 0:
            self.untaken += choices
            self.dispatches.append((now_ms, choices))

    def arrived(self, after_ms: int) -> int:
        found = [choices for sent_ms, choices in self.dispatches if sent_ms <= after_ms]
        del self.dispatches[: len(found)]
        return sum(found)


@dataclass(frozen=True)
class Turn:
    """What happens between two reports: whose news arrive, and who dispatches."""

    backlog: dict[str, int]
    hear: frozenset[str]
    dispatch: frozenset[str]
    arrive: frozenset[str]
    ended: int
    passed_ms: int


_some = st.frozensets(st.sampled_from("ab"))
turns = st.builds(
    Turn,
    backlog=st.fixed_dictionaries({"a": st.sampled_from([1, 500]), "b": st.sampled_from([1, 500])}),
    hear=_some,
    dispatch=_some,
    arrive=_some,
    ended=st.integers(0, 3),
    passed_ms=st.sampled_from([0, 1, 20]),
)


@settings(deadline=None)
@given(st.lists(turns, min_size=10, max_size=30))
def test_two_schedulers_never_give_a_worker_more_than_it_has_L4(turns: list[Turn]) -> None:
    ledger = CreditLedger(HOLD_MS)
    dispatchers = {name: Dispatcher(name) for name in "ab"}
    slots, running, now_ms = 8, 0, 0
    for turn in turns:
        now_ms += turn.passed_ms
        taken = {}
        for name, dispatcher in dispatchers.items():
            late_ms = now_ms - HOLD_MS // 2
            dispatcher.hear(now_ms if name in turn.hear else late_ms)
            taken[name] = dispatcher.arrived(now_ms if name in turn.arrive else late_ms)
            ledger.taken(name, taken[name])
            running += taken[name]
        running -= min(running, turn.ended)
        granted = ledger.grant(slots - running, turn.backlog, now_ms)
        assert sum(granted.values()) <= slots - running
        for name, dispatcher in dispatchers.items():
            dispatcher.reports.append((now_ms, granted[name], taken[name]))
            if name in turn.dispatch:
                dispatcher.dispatch(now_ms)
        under_way = sum(c for d in dispatchers.values() for _, c in d.dispatches)
        assert running + under_way <= slots
