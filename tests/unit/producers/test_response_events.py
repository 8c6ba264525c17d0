"""A token stream as the events of the Responses API: the same numbers for every reader."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.entries import Accepted, Dispatched, Moderated, Started, StreamEntry, Terminal, Text
from contracts.errors import ErrorCode, error_body
from contracts.keep import Keep
from contracts.records import Message, Usage
from contracts.stream_ids import ACCEPTED, DISPATCHED, MODERATED, SEAL, StreamId
from contracts.tiers import FinishReason, Status
from producers.responses.events import ResponseEvents
from producers.responses.objects import ResponseFacts

REQUEST = "chatcmpl-" + "1" * 32
COMPLETED = Terminal(
    status=Status.COMPLETED,
    finish_reasons=[FinishReason.STOP],
    usage=Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2),
)
CUT_OFF = COMPLETED.model_copy(update={"finish_reasons": [FinishReason.LENGTH]})
FAILED = Terminal(status=Status.FAILED, error=error_body(ErrorCode.ENGINE_ERROR, "The engine failed."))
CANCELLED = Terminal(status=Status.CANCELLED)
REFUSED = Terminal(status=Status.REFUSED, error=error_body(ErrorCode.CONTENT_FILTER, "No."))


def facts(*, background: bool = False) -> ResponseFacts:
    params = {"background": True} if background else {}
    said = [Message(role="user", content="hi")]
    return ResponseFacts(REQUEST, 1, "m", Keep(kind="response", params=params), None, said)


def stream(
    texts: list[str], terminal: Terminal | None, *, takeover_at: int | None = None
) -> list[StreamEntry]:
    """A stream with one token a text; another worker takes over after so many."""
    accepted = Accepted(tenant="t", tier="paid", model="served", created_ms=1000)
    entries = [
        StreamEntry(ACCEPTED, accepted),
        StreamEntry(MODERATED, Moderated(prompt_tokens=7)),
        StreamEntry(DISPATCHED, Dispatched(worker_id="w")),
        StreamEntry(StreamId(1, 0), Started(worker_id="w", model_revision="r")),
    ]
    attempt = 1
    for n, text in enumerate(texts):
        if n == takeover_at:
            attempt = 2
            again = Started(worker_id="v", model_revision="r", tokens_out=n)
            entries.append(StreamEntry(StreamId(attempt, 0), again))
        entries.append(StreamEntry(StreamId(attempt, n + 1), Text(text, (n,))))
    return [*entries, StreamEntry(SEAL, terminal)] if terminal is not None else entries


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_whole_reply_is_the_documented_sequence() -> None:
    events = ResponseEvents(facts()).extend(stream(["Hel", "lo", "!"], COMPLETED))
    assert types(events) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta",) * 3,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event.get("delta", "") for event in events)
    response = events[-1]["response"]
    assert text == response["output"][0]["content"][0]["text"] == events[-4]["text"] == "Hello!"
    assert response["model"] == "served"
    assert response["usage"]["total_tokens"] == 10
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {response["output"][0]["id"], events[2]["item"]["id"]}


def test_one_in_the_background_is_queued_first() -> None:
    events = ResponseEvents(facts(background=True)).extend(stream(["a"], COMPLETED))
    assert types(events)[:3] == ["created", "queued", "in_progress"]
    assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]


@pytest.mark.parametrize(
    ("texts", "terminal", "last", "status"),
    [
        (["a"], CUT_OFF, "incomplete", "incomplete"),
        (["a"], CANCELLED, "incomplete", "cancelled"),
        (["a"], FAILED, "failed", "failed"),
        ([], REFUSED, "failed", "failed"),
        ([], COMPLETED, "completed", "completed"),
    ],
)
def test_every_end_is_told(texts: list[str], terminal: Terminal, last: str, status: str) -> None:
    events = ResponseEvents(facts()).extend(stream(texts, terminal))
    assert types(events)[-1] == last
    response = events[-1]["response"]
    assert response["status"] == status
    assert (response["error"] is not None) == (status == "failed")
    assert (response["incomplete_details"] is not None) == (status == "incomplete")


@given(
    texts=st.lists(st.text(min_size=1, max_size=4), max_size=12),
    terminal=st.sampled_from([None, COMPLETED, CUT_OFF, FAILED, CANCELLED]),
    takeover_at=st.integers(0, 12) | st.none(),
    background=st.booleans(),
    cuts=st.lists(st.integers(0, 20), max_size=5),
    seen=st.integers(-1, 30),
)
def test_whatever_was_seen_the_rest_is_exactly_the_rest(
    texts: list[str],
    terminal: Terminal | None,
    takeover_at: int | None,
    background: bool,
    cuts: list[int],
    seen: int,
) -> None:
    """In whatever portions the stream is read, and whoever wrote it (E2, E4)."""
    entries = stream(texts, terminal, takeover_at=takeover_at)
    whole = ResponseEvents(facts(background=background)).extend(entries)
    again, rest, at = ResponseEvents(facts(background=background), seen), [], 0
    for cut in [*sorted(cuts), len(entries)]:
        rest += again.extend(entries[at:cut])
        at = max(at, cut)
    assert rest == whole[seen + 1 :]


def test_an_error_counts_for_nothing() -> None:
    events = ResponseEvents(facts())
    events.extend(stream(["a"], None))
    number = events.number
    assert b'"sequence_number":%d' % number in events.error(error_body(ErrorCode.UNAVAILABLE, "x"))
    assert events.number == number
