"""The simulated model's text and script, without its timing."""

from __future__ import annotations

import json

import pytest

from contracts.sim_tokens import sim_token_ids
from workers.sim_script import ScriptError, parse_script
from workers.sim_text import EOS, SimDetokenizer, reply_base, word_id


def words(prompt: str, seed: int | None = None, choice: int = 0, count: int = 50) -> str:
    base = reply_base(sim_token_ids(prompt), seed, choice)
    detokenizer = SimDetokenizer(())
    return "".join(detokenizer.push(word_id(base, i)) for i in range(count))


def script(*replies: dict[str, object]) -> str:
    return json.dumps({"replies": list(replies)})


def test_prompt_tokens_are_stable_and_cover_any_text() -> None:
    assert sim_token_ids("") == []
    assert sim_token_ids("hi hi") == [sim_token_ids("hi")[0], sim_token_ids(" hi")[0]]
    assert len(sim_token_ids("a, b\n👋!")) == 6
    assert sim_token_ids("hello") == [1024 + 0x3610A686 % 2**17]


def test_text_is_a_pure_function_of_prompt_seed_choice_and_place() -> None:
    assert words("a") == words("a")
    assert len({words("a"), words("b"), words("a", seed=1), words("a", choice=1)}) == 4
    assert words("a", count=50).startswith(words("a", count=20))
    text = words("a", count=100)
    assert len(set(text.split())) > 80
    assert text[0].isupper()


def test_a_marker_chooses_the_reply_and_the_last_one_in_the_prompt_counts() -> None:
    parsed = parse_script(script({"match": "[[a]]"}, {"match": "[[b]]"}))
    plan = parsed.match(sim_token_ids("first [[a]] then [[b]] end"))
    assert plan is not None
    assert plan.reply.match == "[[b]]"
    assert parsed.match(sim_token_ids("[[a2]]")) is None


def test_a_reply_without_a_marker_is_for_every_prompt_that_has_none() -> None:
    parsed = parse_script(script({"match": "[[a]]"}, {"pieces": ["x"]}))
    assert parsed.match([]) is parsed.plans[1]
    assert parsed.match(sim_token_ids("[[a]]")) is parsed.plans[0]


def test_pieces_are_text_bytes_and_single_utf8_bytes_A1() -> None:
    parsed = parse_script(script({"pieces": ["He", {"hex": "e4"}, "He"], "utf8": "é", "then": "eos"}))
    ids = parsed.plans[0].token_ids
    assert ids[0] == ids[2]
    assert ids[3:] == (*"é".encode(), EOS)
    detokenizer = SimDetokenizer(parsed.pieces)
    assert "".join(detokenizer.push(i) for i in ids) == "He\ufffdHeé"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        script({"pieces": [{"hex": "zz"}]}),
        script({"nonsense": 1}),
        script({"eos_at": -1}),
    ],
)
def test_a_bad_script_says_where(text: str) -> None:
    with pytest.raises(ScriptError, match=r"\w"):
        parse_script(text)
