"""Conversations from outcomes: each turn once, in an order that depends on nothing but the log."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.identity import make_request_id
from contracts.records import Message, OutcomeChoice, OutcomeRecord, Usage
from contracts.tiers import Status
from infra.replay.shelf import open_shelf
from infra.replay.turns import Wanted, conversation_object, conversation_of, masked, turn_object


def outcome(number: int, conversation: str | None = None, **fields: Any) -> OutcomeRecord:
    base: dict[str, Any] = {
        "request_id": make_request_id(1_000_000 + number, number.to_bytes(10, "big")),
        "tenant": "t1",
        "key_id": "k",
        "tier": "paid",
        "model": "m",
        "conversation_id": conversation,
        "created_ms": 1_000_000 + number,
        "finished_ms": 2_000_000,
        "turn": [Message(role="user", content=f"Question {number}", name="Ada")],
        "status": Status.COMPLETED,
        "choices": [OutcomeChoice(index=0, text=f"Answer {number}")],
        "usage": Usage(prompt_tokens=3, completion_tokens=2),
    }
    return OutcomeRecord.model_validate(base | fields)


def exported(outcomes: list[OutcomeRecord]) -> str:
    with open_shelf() as shelf:
        for one in outcomes:
            shelf.put(one.tenant, conversation_of(one), turn_object(one))
        found = [conversation_object(c, t, turns) for t, c, turns in shelf.conversations()]
    return "\n".join(map(json.dumps, found))


LOG = [
    outcome(1, "a"),
    outcome(2, "b"),
    outcome(3, "a"),
    outcome(4),
    outcome(5, "a", tenant="t2"),
    outcome(6, "b"),
]


@given(st.permutations(LOG), st.lists(st.sampled_from(LOG)))
def test_order_and_repeats_in_the_log_change_nothing(
    log: list[OutcomeRecord], repeated: list[OutcomeRecord]
) -> None:
    text = exported([*log, *repeated])
    assert text == exported(LOG)
    found = [json.loads(line) for line in text.splitlines()]
    assert [(c["tenant"], c["id"], len(c["turns"])) for c in found] == [
        ("t1", "a", 2),
        ("t1", "b", 2),
        ("t1", LOG[3].request_id, 1),
        ("t2", "a", 1),
    ]


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        (Wanted(), [1, 2, 3, 4, 5, 6]),
        (Wanted(tenant="t2"), [5]),
        (Wanted(conversation="a"), [1, 3, 5]),
        (Wanted(conversation=LOG[3].request_id), [4]),
        (Wanted(model="other"), []),
        (Wanted(since_ms=1_000_002, until_ms=1_000_005), [2, 3, 4]),
    ],
)
def test_only_what_is_wanted(wanted: Wanted, numbers: list[int]) -> None:
    assert [n for n, one in enumerate(LOG, 1) if wanted.takes(one)] == numbers


def test_a_redacted_conversation_has_its_shape_and_none_of_its_words() -> None:
    turns = [turn_object(LOG[0])]
    shown = conversation_object("Ada-1", "ACME", turns, redact=True)
    text = json.dumps(shown)
    for word in ("Question", "Answer", "Ada", "ACME"):
        assert word not in text
    assert shown["turns"][0]["messages"][0] == {"role": "user", "content": "xxxxxxxx 0", "name": "xxx"}
    assert shown["turns"][0]["usage"] == turns[0]["usage"]
    assert conversation_object("Ada-1", "ACME", turns, redact=True)["id"] == shown["id"]


@given(st.text())
def test_masking_keeps_the_length_and_no_letter_or_digit(text: str) -> None:
    found = masked(text)
    assert len(found) == len(text)
    assert {c for c in found if c.isalpha()} <= {"x"}
    assert {c for c in found if c.isdecimal()} <= {"0"}
    assert masked(found) == found
