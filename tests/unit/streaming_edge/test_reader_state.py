"""The hand-over between live entries and catching up, under any interleaving."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contracts.entries import StreamEntry, Text
from contracts.stream_ids import START, StreamId
from streaming_edge.reader_state import ReaderState


def entries(first: int, last: int) -> list[StreamEntry]:
    return [StreamEntry(StreamId(1, n), Text(f"{n} ")) for n in range(first, last + 1)]


class Interleavings(RuleBasedStateMachine):
    """Writer, feed, page reads and the consumer of one reader, in any order.

    The store holds entries 1..written; the feed has pushed 1..pushed; a page read sees the store as it was
    at some moment between its start and its end.
    """

    @initialize(limit=st.integers(1, 6), history=st.integers(0, 20), data=st.data())
    def begin(self, limit: int, history: int, data: st.DataObject) -> None:
        self.written = history
        self.pushed = data.draw(st.integers(0, history))
        self.cursor = data.draw(st.integers(0, history))
        self.limit = limit
        self.out: list[int] = []
        self.began = self.cursor
        self.state = ReaderState(limit, StreamId(1, self.cursor), StreamId(1, self.pushed))
        self.page_read: list[StreamEntry] | None = None

    @rule(count=st.integers(1, 5))
    def write(self, count: int) -> None:
        self.written += count

    @precondition(lambda self: self.pushed < self.written)
    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        last = data.draw(st.integers(self.pushed + 1, self.written))
        self.state.push(entries(self.pushed + 1, last))
        self.pushed = last

    @rule()
    def take(self) -> None:
        self._out(self.state.take())

    @precondition(lambda self: self.state.behind and self.page_read is None)
    @rule()
    def page_reads_the_store(self) -> None:
        at = self.state.cursor.token
        self.page_read = entries(at + 1, min(self.written, at + self.limit))

    @precondition(lambda self: self.page_read is not None)
    @rule()
    def page_arrives(self) -> None:
        assert self.page_read is not None
        page, self.page_read = self.page_read, None
        assert self.state.page(page)
        self._out(page)

    def _out(self, items: list[StreamEntry]) -> None:
        self.out += [item.id.token for item in items]

    @invariant()
    def exactly_once_and_in_order(self) -> None:
        assert self.out == list(range(self.began + 1, self.began + 1 + len(self.out)))

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.state.buffered <= self.limit

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        if self.page_read is not None:
            self.page_arrives()
        while self.state.behind:
            self.page_reads_the_store()
            self.page_arrives()
        self.take()
        assert (self.began + len(self.out)) >= self.pushed, "nothing pushed may stay hidden"


Interleavings.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase


def test_reader_that_keeps_up_never_reads_pages() -> None:
    state = ReaderState(4, START, START)
    for n in range(1, 50):
        assert not state.push(entries(n, n))
        assert [e.id.token for e in state.take()] == [n]
    assert not state.behind


def test_overflow_drops_the_buffer_and_keeps_the_place_f1() -> None:
    state = ReaderState(4, START, START)
    assert not state.push(entries(1, 4))
    assert state.push(entries(5, 5))
    assert state.behind
    assert state.buffered == 0
    assert state.take() == []
    assert state.cursor == START
    assert not state.push(entries(6, 6)), "one overflow is counted once"


def test_page_that_overtakes_the_feed_is_not_repeated_by_it() -> None:
    state = ReaderState(8, START, StreamId(1, 2))
    assert state.behind
    assert state.page(entries(1, 5))
    assert not state.behind
    state.push(entries(3, 6))
    assert [e.id.token for e in state.take()] == [6]


def test_empty_page_while_behind_is_a_gap() -> None:
    state = ReaderState(8, START, StreamId(1, 2))
    assert not state.page([])


@pytest.mark.parametrize("ahead", [0, 3])
def test_reader_at_or_ahead_of_the_feed_is_live_at_once(ahead: int) -> None:
    state = ReaderState(8, StreamId(1, 2 + ahead), StreamId(1, 2))
    assert not state.behind
    state.push(entries(3, 6))
    assert [e.id.token for e in state.take()] == list(range(3 + ahead, 7))


@given(st.lists(st.integers(1, 4), max_size=12), st.integers(1, 3))
def test_buffer_never_exceeds_its_limit(batches: list[int], limit: int) -> None:
    state = ReaderState(limit, START, START)
    at = 0
    for size in batches:
        state.push(entries(at + 1, at + size))
        at += size
        assert state.buffered <= limit
