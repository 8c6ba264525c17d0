"""No reply with a hole: entries that do not join are told from those that do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from contracts.continuity import joins, tokens_after, tokens_at
from contracts.entries import Started, StreamEntry, Terminal, Text
from contracts.errors import ErrorCode
from contracts.reply import Reply
from contracts.stream_ids import ACCEPTED, SEAL, START, StreamId
from contracts.tiers import FinishReason, Status

DONE = Terminal(status=Status.COMPLETED, finish_reasons=[FinishReason.STOP])


def written(sizes: list[tuple[int, int]], restart_at: int | None = None) -> list[StreamEntry]:
    """A stream as workers write it: ``(tokens, choice)`` of each text, attempt 2 from ``restart_at`` on."""
    items, out, attempt = [start(1, 0)], 0, 1
    for at, (size, choice) in enumerate(sizes):
        if at == restart_at:
            attempt = 2
            items.append(start(2, out))
        out += size
        items.append(StreamEntry(StreamId(attempt, out), Text("x" * size, (7,) * size, choice)))
    return [*items, StreamEntry(SEAL, DONE)]


def start(attempt: int, tokens_out: int | None) -> StreamEntry:
    entry = Started(worker_id="w", model_revision="1", tokens_out=tokens_out)
    return StreamEntry(StreamId(attempt, 0), entry)


_texts = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=30)


@given(_texts, st.integers(0, 29))
def test_what_workers_write_joins_whatever_the_choices_and_attempts(
    sizes: list[tuple[int, int]], restart_at: int
) -> None:
    items = written(sizes, restart_at)
    assert Reply().extend(items).gap is None
    for cut, item in enumerate(items):
        tokens_out = tokens_at(item.id)
        for later in items[cut + 1 :]:
            assert joins(tokens_out, later)
            tokens_out = tokens_after(tokens_out, later)


@given(_texts, st.data())
def test_any_text_that_is_missing_inside_is_a_gap_and_the_reply_has_failed(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    items = written([*sizes, (1, 0)])
    missing = data.draw(st.integers(1, len(sizes)))
    kept = items[:missing] + items[missing + 1 :]
    reply = Reply().extend(kept)
    assert reply.gap == items[missing + 1].id
    assert reply.tokens_out == sum(size for size, _ in sizes[: missing - 1])
    assert sum(len(c.text) for c in reply.choices.values()) == reply.tokens_out
    assert reply.terminal is not None
    assert reply.terminal.status is Status.FAILED
    assert reply.terminal.error is not None
    assert reply.terminal.error.code == ErrorCode.STREAM_LOST


def test_e10_a_start_that_goes_on_before_what_was_read_does_not_join() -> None:
    """A lost end that another attempt has written anew: who read the old one must not read on."""
    assert not joins(50, start(2, 40))
    assert joins(40, start(2, 40))
    assert joins(50, start(2, None)), "written by an older version"
    assert not joins(50, StreamEntry(StreamId(2, 41), Text("x", (1,))))


def test_an_offset_says_how_many_tokens_are_before_it_where_it_can() -> None:
    assert [tokens_at(i) for i in (START, ACCEPTED, StreamId(1, 0), StreamId(3, 9))] == [0, 0, 0, 9]
    assert tokens_at(StreamId(2, 0)) is None
    assert tokens_at(SEAL) is None
    assert tokens_after(None, start(2, 17)) == 17
    assert joins(None, StreamEntry(StreamId(2, 9), Text("x", (1,))))


def test_a_cancelled_reply_with_a_gap_stays_cancelled() -> None:
    items = written([(1, 0), (1, 0), (1, 0)])
    cancelled = StreamEntry(SEAL, Terminal(status=Status.CANCELLED))
    reply = Reply().extend([*items[:2], items[3], cancelled])
    assert reply.terminal == cancelled.entry
    assert reply.choices[0].text == "x"
