"""B8, D2, O1, P1: which turns later turns see, and what is counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from contracts.conversation import Turn, context_messages, turn_of, turn_of_reply
from contracts.entries import Accepted, StreamEntry, Terminal, Text
from contracts.errors import ErrorCode, error_body
from contracts.records import Message, OutcomeChoice, OutcomeRecord
from contracts.reply import Reply
from contracts.stream_ids import ACCEPTED, SEAL, StreamId
from contracts.tiers import Status
from stages.history import Recent, tier_label, worth_keeping, worth_rebuilding
from tests.stored import kept_outcome


def turn(number: int, status: Status = Status.COMPLETED, reply: str = "answer") -> Turn:
    return Turn(
        request_id=f"r{number:03d}",
        created_ms=1,
        messages=[Message(role="user", content=f"question {number}")],
        reply=f"{reply} {number}" if reply else "",
        status=status,
    )


def texts(turns: list[Turn], max_turns: int = 100) -> list[str]:
    return [m.content for m in context_messages(turns, max_turns)]


def test_turns_become_question_and_answer_in_order_of_request_id() -> None:
    messages = context_messages([turn(2), turn(1)], 100)
    assert [m.role for m in messages] == ["user", "assistant"] * 2
    assert [m.content for m in messages] == ["question 1", "answer 1", "question 2", "answer 2"]


def test_b8_failed_refused_and_expired_turns_are_left_out_whole() -> None:
    left_out = [turn(i, s) for i, s in enumerate([Status.FAILED, Status.REFUSED, Status.EXPIRED])]
    assert texts([*left_out, turn(9)]) == ["question 9", "answer 9"]


def test_d2_a_cancelled_turn_counts_with_the_text_that_was_out() -> None:
    assert texts([turn(1, Status.CANCELLED)]) == ["question 1", "answer 1"]
    assert texts([turn(1, Status.CANCELLED, reply="")]) == []


def test_a_completed_empty_answer_is_an_answer() -> None:
    assert texts([turn(1, reply="")]) == ["question 1", ""]


def test_only_the_latest_turns_that_count_are_used() -> None:
    turns = [turn(1), turn(2), turn(3, Status.FAILED), turn(4)]
    assert texts(turns, 2) == ["question 2", "answer 2", "question 4", "answer 4"]


@given(st.permutations(range(8)), st.lists(st.integers(0, 7)))
def test_order_and_repetition_of_delivery_make_no_difference(
    order: list[int], repeated: list[int]
) -> None:
    every = [turn(i) for i in range(8)]
    assert texts([every[i] for i in [*order, *repeated]]) == texts(every)


def outcome(**fields: object) -> OutcomeRecord:
    base: dict[str, object] = {
        "request_id": "chatcmpl-" + "1" * 32,
        "tenant": "t",
        "key_id": "k",
        "tier": "paid",
        "model": "m",
        "conversation_id": "c",
        "created_ms": 5,
        "finished_ms": 1_000_000,
        "turn": [Message(role="user", content="q")],
        "status": Status.COMPLETED,
        "choices": [OutcomeChoice(index=1, text="second"), OutcomeChoice(index=0, text="first")],
    }
    return OutcomeRecord.model_validate(base | fields)


def test_the_turn_of_an_outcome_is_its_first_choice() -> None:
    made = turn_of(outcome())
    assert (made.reply, made.status, made.created_ms) == ("first", Status.COMPLETED, 5)
    assert turn_of(outcome(choices=[], status=Status.FAILED)).reply == ""


def test_a_pending_turn_is_read_from_its_stream_once_that_is_sealed() -> None:
    asked = [Message(role="user", content="q")]
    reply = Reply().extend(
        [
            StreamEntry(ACCEPTED, Accepted(tenant="t", tier="paid", model="m", created_ms=7)),
            StreamEntry(StreamId(1, 1), Text("par")),
            StreamEntry(StreamId(1, 2), Text("tial")),
        ]
    )
    assert turn_of_reply("r1", asked, reply) is None
    reply.apply(StreamEntry(SEAL, Terminal(status=Status.CANCELLED)))
    made = turn_of_reply("r1", asked, reply)
    assert made == Turn(
        request_id="r1", created_ms=7, messages=asked, reply="partial", status=Status.CANCELLED
    )


def test_b8_an_error_never_is_an_answer() -> None:
    error = error_body(ErrorCode.ENGINE_ERROR, "the engine failed")
    made = turn_of(outcome(status=Status.FAILED, error=error))
    assert not made.counts
    assert "engine" not in made.model_dump_json()


def test_p1_an_unknown_tier_is_counted_as_other() -> None:
    assert tier_label("paid", {"paid": 1, "free": 2}) == "paid"
    assert tier_label("x" * 500, {"paid": 1}) == "other"


def test_a_rebuild_leaves_out_what_has_no_conversation_or_is_forgotten_by_age() -> None:
    assert worth_rebuilding(outcome(), 1_059_999, 60)
    assert not worth_rebuilding(outcome(), 1_060_000, 60)
    assert not worth_rebuilding(outcome(conversation_id=None), 1_000_000, 60)


def test_a_rebuild_keeps_what_asked_for_it_for_as_long_as_it_would_live() -> None:
    kept = kept_outcome()
    assert worth_keeping(kept, kept.finished_ms + 59_999, 60)
    assert not worth_keeping(kept, kept.finished_ms + 60_000, 60)
    assert not worth_keeping(kept.model_copy(update={"keep": None}), kept.finished_ms, 60)


def test_turns_are_in_order_of_time_whatever_their_ids_begin_with() -> None:
    def named(request_id: str) -> Turn:
        return turn(1, reply=request_id).model_copy(update={"request_id": request_id})

    ids = [f"{prefix}_{number:032x}" for number, prefix in enumerate(("z", "a", "m"))]
    assert texts([named(i) for i in reversed(ids)])[1::2] == [f"{i} 1" for i in ids]


@given(st.integers(1, 5), st.booleans(), st.data())
def test_taking_items_out_leaves_the_others_as_they_were(
    count: int, answered: bool, data: st.DataObject
) -> None:
    whole = Turn(
        request_id=f"r_{1:032x}",
        created_ms=1,
        messages=[Message(role="user", content=f"q{at}") for at in range(count)],
        reply="answer" if answered else None,
        status=Status.COMPLETED,
    )
    items = whole.items()
    gone = data.draw(st.sets(st.sampled_from(range(len(items)))))
    left = whole
    for at in data.draw(st.permutations(sorted(gone))):
        left = left.without(at)
    assert left.counts
    assert left.items() == [item for at, item in enumerate(items) if at not in gone]
    assert Turn.model_validate_json(left.model_dump_json()) == left
    assert not any(items[at].message.content in left.model_dump_json() for at in gone)


def test_an_outcome_is_counted_once_and_memory_is_bounded() -> None:
    recent = Recent(size=3)
    assert [recent.is_new(x) for x in "aabacda"] == [True, False, True, False, True, True, False]
    assert not recent.is_new("d")
    assert recent.is_new("b"), "the oldest is forgotten"
