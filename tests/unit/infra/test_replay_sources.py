"""Conversations from exports and from the chat logs that people have."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.replay.report import figures, page, similarity
from infra.replay.runner import TurnResult, start_seconds
from infra.replay.sources import RecordedTurn, read_conversations
from infra.replay.turns import conversation_object, turn_object
from tests.unit.infra.test_export_turns import outcome

SAID = [("system", "s"), ("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")]
OPENAI = {"messages": [{"role": role, "content": text} for role, text in SAID]}
SHAREGPT = {
    "id": "x",
    "conversations": [
        {"from": {"user": "human", "assistant": "gpt"}.get(role, role), "value": text}
        for role, text in SAID
    ],
}


def shape(turns: list[RecordedTurn]) -> list[tuple[list[str], str | None]]:
    return [([m["content"] for m in turn.added], turn.reply) for turn in turns]


@pytest.mark.parametrize("raw", [OPENAI, SHAREGPT])
@pytest.mark.parametrize("array", [False, True])
def test_chat_logs_are_cut_at_the_replies(raw: dict[str, Any], array: bool) -> None:
    text = json.dumps([raw], indent=1) if array else json.dumps(raw)
    found = read_conversations(("\ufeff" + text).splitlines(keepends=True))
    assert found.unreadable == 0
    (conversation,) = found.conversations
    assert shape(conversation.turns) == [(["s", "q1"], "a1"), (["q2"], "a2")]


def test_an_export_is_read_with_its_times() -> None:
    line = json.dumps(conversation_object("c", "t", [turn_object(outcome(n)) for n in (1, 2)]))
    (conversation,) = read_conversations([line, line]).conversations
    assert shape(conversation.turns) == [
        (["Question 1"], "Answer 1"),
        (["Question 2"], "Answer 2"),
    ]
    first, second = conversation.turns
    assert second.at_ms - first.at_ms == 1
    assert start_seconds(second, first.at_ms, 0.5) == 0.002
    assert start_seconds(second, first.at_ms, None) == 0


def test_tenants_may_name_their_conversations_alike() -> None:
    lines = [
        json.dumps(conversation_object("c", tenant, [turn_object(outcome(n))]))
        for n, tenant in enumerate(["t1", "t2", "t1"], 1)
    ]
    found = read_conversations(lines).conversations
    assert [one.turns[0].reply for one in found] == ["Answer 1", "Answer 2"]


@given(st.integers(0, 400))
def test_a_log_that_was_cut_off_gives_what_is_whole_O1(cut: int) -> None:
    lines = [json.dumps(OPENAI | {"id": str(n)}) + "\n" for n in range(3)]
    text = "".join(lines)[:cut]
    found = read_conversations(text.splitlines(keepends=True))
    assert len(found.conversations) == sum(len("".join(lines[: n + 1])) - 1 <= cut for n in range(3))
    assert found.unreadable <= 1


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda s: (
            st.lists(s)
            | st.dictionaries(
                st.sampled_from(["messages", "conversations", "turns", "role", "content", "id"]), s
            )
        ),
    )
)
def test_whatever_else_is_there_is_counted(raw: object) -> None:
    found = read_conversations([json.dumps({"messages": [raw]}), json.dumps(raw)])
    assert found.unreadable + len(found.conversations) >= 1
    assert all(turn.added for one in found.conversations for turn in one.turns)


def result(before: str | None, after: str, outcome: str = "completed") -> TurnResult:
    turn = RecordedTurn([{"role": "user", "content": "<b>q</b>"}], before, ttft_ms=10)
    return TurnResult("<c>", 0, turn, outcome, after, 3, 20.0, 30.0)


def test_texts_are_compared_by_their_words() -> None:
    assert similarity(result("a b c d", "a b c d")) == 1
    assert similarity(result("a b c d", "a b x d")) == 0.75
    assert similarity(result("a b", "a  b")) == 0.999
    assert similarity(result(None, "a")) is None
    assert similarity(result("a", "a", "worker_lost")) is None


def test_the_page_shows_texts_as_texts() -> None:
    shown = page([result("<script>1</script>", "<i>x</i>")])
    assert "<script>1" not in shown
    assert "<i>x" not in shown
    assert "&lt;i&gt;x" in shown
    assert "http" not in shown


def test_the_figures_stand_side_by_side() -> None:
    rows = {row.name: row for row in figures([result("a", "a"), result("a", "", "engine_error")])}
    assert rows["outcomes"].replayed == "1 completed, 1 engine_error"
    assert (rows["TTFT ms p50"].recorded, rows["TTFT ms p50"].replayed) == ("10", "20")
    assert rows["texts that are equal"].replayed == "1 of 1"
    assert figures([])
