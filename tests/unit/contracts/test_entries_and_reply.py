import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.degraded import Degraded
from contracts.entries import (
    Accepted,
    Dispatched,
    Entry,
    Moderated,
    Started,
    StreamEntry,
    Terminal,
    Text,
    decode_entry,
    encode_entry,
)
from contracts.outcome import make_outcome, outcome_of_stream
from contracts.records import OutcomeRecord, Usage, decode
from contracts.reply import Reply
from contracts.stream_ids import ACCEPTED, DISPATCHED, MODERATED, SEAL, StreamId
from contracts.tiers import FinishReason, Status

from .test_records import record

LESS = Degraded(step="standard_shorter", reason="slow")


def wire(entry: Entry) -> dict[bytes, bytes]:
    return {
        k.encode(): v if isinstance(v, bytes) else v.encode() for k, v in encode_entry(entry).items()
    }


@pytest.mark.parametrize(
    ("entry_id", "entry"),
    [
        (ACCEPTED, Accepted(tenant="t", tier="paid", model="m", created_ms=5)),
        (ACCEPTED, Accepted(tenant="t", tier="free", model="m", created_ms=5, degraded=LESS)),
        (MODERATED, Moderated(prompt_tokens=3)),
        (DISPATCHED, Dispatched(worker_id="w")),
        (StreamId(1, 0), Started(worker_id="w", model_revision="1")),
        (StreamId(1, 3), Text("👩‍💻 a\u2028b", (1, 2, 3))),
        (StreamId(2, 9), Text("x", (), 2, ({"token": "x", "logprob": -0.5},))),
        (SEAL, Terminal(status=Status.COMPLETED, finish_reasons=[FinishReason.STOP], usage=Usage())),
    ],
)
def test_an_entry_survives_the_wire(entry_id: StreamId, entry: Entry) -> None:
    assert decode_entry(entry_id, wire(entry)) == entry


@pytest.mark.parametrize(
    ("entry_id", "fields"),
    [(StreamId(1, 1), {b"x": b"y"}), (SEAL, {b"j": b"{"}), (StreamId(0, 9), {b"j": b"{}"})],
)
def test_foreign_fields_are_an_error(entry_id: StreamId, fields: dict[bytes, bytes]) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_entry(entry_id, fields)


def stream(*texts: str, attempts: int = 1) -> list[StreamEntry]:
    items = [
        StreamEntry(ACCEPTED, Accepted(tenant="t", tier="paid", model="m", created_ms=5)),
        StreamEntry(MODERATED, Moderated(prompt_tokens=3)),
        StreamEntry(StreamId(1, 0), Started(worker_id="w", model_revision="1")),
    ]
    for n, text in enumerate(texts, 1):
        attempt = 1 + n * (attempts - 1) // len(texts)
        items.append(StreamEntry(StreamId(attempt, n), Text(text, (n,))))
    return items


@given(st.lists(st.text(min_size=1), min_size=1, max_size=20), st.data())
def test_e1_any_repetition_and_cut_folds_to_the_same_reply(
    texts: list[str], data: st.DataObject
) -> None:
    items = stream(*texts)
    cut = data.draw(st.integers(0, len(items)))
    again = data.draw(st.integers(0, cut))
    reply = Reply().extend(items[:cut]).extend(items[again:])
    assert reply.choices[0].text == "".join(texts)
    assert reply.tokens_out == len(texts)
    assert reply.choices[0].token_ids == list(range(1, len(texts) + 1))


def test_j11_usage_of_a_reply_somebody_cancelled_is_what_was_produced() -> None:
    items = [*stream("a", "b", "c"), StreamEntry(SEAL, Terminal(status=Status.CANCELLED))]
    reply = Reply().extend(items)
    assert reply.usage == Usage(prompt_tokens=3, completion_tokens=3)
    outcome = make_outcome(record(), reply, now_ms=9)
    assert (outcome.status, outcome.choices[0].text) == (Status.CANCELLED, "abc")


def test_the_outcome_says_what_a_request_got_less_of_also_when_its_record_is_lost() -> None:
    accepted = Accepted(tenant="t", tier="free", model="m", created_ms=1, degraded=LESS)
    reply = Reply().extend([*stream("a"), StreamEntry(SEAL, Terminal(status=Status.COMPLETED))])
    request = record().model_copy(update={"degraded": LESS})
    found = make_outcome(request, reply, now_ms=9)
    assert found.degraded == LESS
    assert decode(OutcomeRecord, found.encode()) == found
    assert outcome_of_stream(request.request_id, accepted, reply, now_ms=9).degraded == LESS


def test_an_open_stream_has_no_outcome() -> None:
    with pytest.raises(ValueError, match="seal"):
        make_outcome(record(), Reply().extend(stream("a")), now_ms=9)


def test_b5_an_empty_answer_has_a_choice_with_a_finish_reason() -> None:
    seal = Terminal(status=Status.COMPLETED, finish_reasons=[FinishReason.STOP])
    reply = Reply().extend([*stream(), StreamEntry(SEAL, seal)])
    (choice,) = reply.outcome_choices()
    assert (choice.text, choice.finish_reason) == ("", FinishReason.STOP)
