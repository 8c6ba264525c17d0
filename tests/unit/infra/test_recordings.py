"""Recordings as files: what is read of them, whatever has become of them, and the times they are given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.entries import Accepted, Entry, Moderated, Started, StreamEntry, Terminal, Text
from contracts.errors import ErrorCode, error_body
from contracts.identity import make_request_id
from contracts.records import Usage
from contracts.reply import Reply
from contracts.stream_ids import ACCEPTED, MODERATED, SEAL, StreamId
from contracts.tiers import FinishReason, Status
from infra.replay.recordings import (
    Recording,
    TimedEntry,
    even,
    read_recordings,
    recording_object,
    redacted,
    spoken,
)
from infra.replay.sources import RecordedTurn
from infra.replay.turns import conversation_object, turn_object
from tests.unit.infra.test_export_turns import outcome

RID = make_request_id(1, bytes(10))
PIECES = ["Hello", " Ada", ",", " it is", " 5", " o'clock", "."]

#: On a busy machine a call may take any time.
unhurried = settings(deadline=None)


def timed(at_ms: int, entry_id: StreamId, entry: Entry) -> TimedEntry:
    return TimedEntry(at_ms, StreamEntry(entry_id, entry))


def recording(pieces: Sequence[str] = PIECES) -> Recording:
    accepted = Accepted(
        tenant="acme", key_id="k", tier="paid", model="m", created_ms=5, conversation_id="Ada-1"
    )
    entries = [
        timed(0, ACCEPTED, accepted),
        timed(4, MODERATED, Moderated(prompt_tokens=3)),
        timed(9, StreamId(1, 0), Started(worker_id="w", model_revision="1", tokens_out=0)),
    ]
    for n, piece in enumerate(pieces, 1):
        logprobs = ({"token": piece, "logprob": -0.5},) if n == 1 else None
        entries.append(timed(10 * n + 10, StreamId(1, n), Text(piece, (100 + n,), 0, logprobs)))
    reasons = [FinishReason.STOP]
    usage = Usage(prompt_tokens=3, completion_tokens=len(pieces))
    done = Terminal(status=Status.COMPLETED, finish_reasons=reasons, usage=usage)
    return Recording(RID, "measured", (*entries, timed(99, SEAL, done)))


def line_of(one: Recording, **changes: Any) -> str:
    return json.dumps(recording_object(one) | changes)


def reply_of(one: Recording) -> Reply:
    return Reply().extend(item for _, item in one.entries)


def the_one(*lines: str) -> Recording:
    (found,) = read_recordings(lines).found
    return found


def test_what_is_written_is_read_again() -> None:
    read = read_recordings([line_of(recording())])
    assert read.found == [recording()]
    assert (read.unreadable, read.incomplete) == (0, 0)


@unhurried
@given(st.data())
def test_entries_that_came_twice_are_played_once(data: st.DataObject) -> None:
    entries = recording_object(recording())["entries"]
    for _ in range(data.draw(st.integers(1, 6))):
        again = data.draw(st.integers(0, len(entries) - 1))
        entries.insert(data.draw(st.integers(again + 1, len(entries))), entries[again])
    found = the_one(line_of(recording(), entries=entries))
    assert [item for _, item in found.entries] == [item for _, item in recording().entries]
    times = [at_ms for at_ms, _ in found.entries]
    assert times == sorted(times)


@pytest.mark.parametrize("missing", range(1, len(PIECES) + 1))
def test_a_hole_ends_the_reply_as_failed_where_it_is(missing: int) -> None:
    entries = [e for e in recording_object(recording())["entries"] if e["id"] != f"1-{missing}"]
    read = read_recordings([line_of(recording(), entries=entries)])
    reply = reply_of(read.found[0])
    last = missing == len(PIECES)  # nothing after it says that it is missing
    assert reply.text == "".join(PIECES[: missing - 1])
    assert reply.terminal is not None
    assert reply.terminal.status is (Status.COMPLETED if last else Status.FAILED)
    assert read.incomplete == (0 if last else 1)


@unhurried
@given(st.integers(1, len(PIECES) + 3))
def test_a_recording_that_was_cut_off_ends_as_failed(kept: int) -> None:
    entries = recording_object(recording())["entries"][:kept]
    read = read_recordings([line_of(recording(), entries=entries)])
    (found,) = read.found
    terminal = reply_of(found).terminal
    assert read.incomplete == 1
    assert terminal is not None
    assert terminal.error is not None
    assert terminal.error.code == ErrorCode.STREAM_LOST.value
    assert found.entries[-1].at_ms == found.entries[-2].at_ms


@unhurried
@given(st.integers(0, 4_000))
def test_a_file_that_was_cut_off_gives_what_is_whole(cut: int) -> None:
    ids = [make_request_id(n, bytes(10)) for n in range(3)]
    lines = [line_of(recording(), request_id=rid) + "\n" for rid in ids]
    read = read_recordings("".join(lines)[:cut].splitlines(keepends=True))
    whole = sum(len("".join(lines[: n + 1])) - 1 <= cut for n in range(3))
    assert [one.request_id for one in read.found] == ids[:whole]
    assert read.unreadable <= 1


@unhurried
@given(
    st.recursive(
        st.none() | st.integers() | st.text() | st.just(float("inf")),
        lambda s: (
            st.lists(s)
            | st.dictionaries(
                st.sampled_from(
                    ["at_ms", "id", "text", "token_ids", "event", "index", "logprobs", "timing"]
                ),
                s | st.sampled_from(["0-1", "1-0", "1-1", "1-2"]),
            )
        ),
        max_leaves=12,
    )
)
def test_whatever_else_is_there_becomes_a_reply_that_ends(raw: object) -> None:
    read = read_recordings([json.dumps({"request_id": RID, "entries": [raw, raw]}), json.dumps([raw])])
    for one in read.found:
        assert one.entries[0].item.id == ACCEPTED
        assert one.entries[-1].item.id.is_seal


def test_a_redacted_recording_has_its_shape_and_none_of_its_words() -> None:
    hidden = redacted(recording())
    text = line_of(hidden)
    for word in ("Hello", "Ada", "clock", "acme", "token_ids", "logprob"):
        assert word not in text
    assert [len(p) for p in PIECES] == [
        len(i.entry.text) for _, i in hidden.entries if isinstance(i.entry, Text)
    ]
    assert [(at_ms, item.id) for at_ms, item in hidden.entries] == [
        (at_ms, item.id) for at_ms, item in recording().entries
    ]
    assert the_one(text) == hidden


@unhurried
@given(st.text())
def test_a_text_without_a_recording_is_cut_into_pieces_that_are_all_of_it(text: str) -> None:
    items = spoken(RecordedTurn([], text))
    reply = Reply().extend(items)
    assert reply.text == text
    assert reply.terminal is not None
    assert reply.terminal.status is Status.COMPLETED
    pieces = [item.entry.text for item in items if isinstance(item.entry, Text)]
    assert all(0 < len(piece.strip()) <= 8 for piece in pieces[:-1])


@unhurried
@given(st.integers(0, 40), st.integers(0, 5_000), st.integers(0, 9_000))
def test_a_reply_without_times_is_spread_from_its_first_token_to_its_end(
    pieces: int, ttft_ms: int, duration_ms: int
) -> None:
    items = [item for _, item in recording([f"{n} " for n in range(pieces)]).entries]
    entries = even(items, ttft_ms, duration_ms)
    assert [item for _, item in entries] == items
    times = [at_ms for at_ms, item in entries if isinstance(item.entry, Text)]
    assert entries[-1].at_ms == max(ttft_ms, duration_ms)
    assert times[:1] == [ttft_ms][: len(times)]
    steps = [after - before for before, after in pairwise([*times, entries[-1].at_ms])] if times else []
    assert not steps or max(steps) - min(steps) <= 1


def test_where_no_times_are_known_a_piece_comes_every_20_ms() -> None:
    entries = even(spoken(RecordedTurn([], "one two three")), None, None)
    assert [at_ms for at_ms, _ in entries] == [0, 0, 0, 0, 20, 40, 60]


def test_an_export_and_a_chat_log_are_played_too() -> None:
    answered = turn_object(outcome(1, ttft_ms=100, duration_ms=300))
    error = error_body(ErrorCode.WORKER_LOST, "x")
    failed = turn_object(outcome(2, status=Status.FAILED, error=error))
    export = json.dumps(conversation_object("c", "t", [answered, failed]))
    chat = json.dumps(
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": "never answered"},
            ]
        }
    )
    read = read_recordings([export, export, chat])
    first, second, third = read.found
    assert [first.request_id, second.request_id] == [answered["request_id"], failed["request_id"]]
    assert first.model == "m"
    assert (first.entries[3].at_ms, first.entries[-1].at_ms) == (100, 300)
    assert reply_of(first).usage == Usage(prompt_tokens=3, completion_tokens=2)
    terminal = reply_of(second).terminal
    assert terminal is not None
    assert terminal.error is not None
    assert terminal.error.code == "worker_lost"
    assert reply_of(third).text == "a"
    assert read_recordings([chat]).found == read_recordings([chat]).found
    assert {one.timing for one in read.found} == {"even"}
