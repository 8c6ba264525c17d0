"""Which tokens of a prompt are of a shareable system prompt, and say nothing of anyone's text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from contracts.records import Message
from stages.protocols import PromptTokenizer
from stages.shared_prompts import SharedPrompts
from stages.tokenizer_hf import HfTokenizer
from stages.tokenizer_sim import SimTokenizer
from tests.unit.stages.test_prompt_tokenizers import TEMPLATE, model_folder

SHARED = "You are a kind assistant. Answer in one sentence."
MODEL = "m"
#: Refuses a conversation that does not begin with a user.
NO_SYSTEM = TEMPLATE.replace("m['role'] == 'assistant'", "m['role'] == 'system'")

Role = Literal["system", "developer", "user", "assistant"]


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory, threads: ThreadPoolExecutor) -> HfTokenizer:
    return HfTokenizer(model_folder(tmp_path_factory.mktemp("model")), threads)


@pytest.fixture(scope="module", params=["sim", "hf"])
def tokenizer(
    request: pytest.FixtureRequest, threads: ThreadPoolExecutor, hf: HfTokenizer
) -> PromptTokenizer:
    return SimTokenizer(threads) if request.param == "sim" else hf


def turns(*contents: str, first: Role = "system") -> list[Message]:
    """A conversation: a first message, then user and assistant by turns."""
    rest: list[Role] = ["user", "assistant"]
    return [
        Message(role=first if i == 0 else rest[(i - 1) % 2], content=content)
        for i, content in enumerate(contents)
    ]


async def shared(
    tokenizer: PromptTokenizer, messages: Sequence[Message], texts: Sequence[str] = (SHARED,)
) -> int:
    prompts = SharedPrompts(texts, {MODEL: tokenizer})
    return await prompts.tokens_of(MODEL, messages, await tokenizer.encode(messages))


async def test_a_shareable_prompt_is_told_by_its_tokens(tokenizer: PromptTokenizer) -> None:
    messages = turns(SHARED, "hello there")
    token_ids = await tokenizer.encode(messages)
    count = await shared(tokenizer, messages)
    assert 8 < count < len(token_ids)
    only = await tokenizer.encode(turns(SHARED, "Z"))
    assert token_ids[:count] == only[:count]


@pytest.mark.parametrize("first", ["system", "developer"])
async def test_an_operator_s_message_has_either_role(tokenizer: PromptTokenizer, first: Role) -> None:
    assert await shared(tokenizer, turns(SHARED, "hello", first=first))


@pytest.mark.parametrize(
    "messages",
    [
        turns(SHARED, "x", first="user"),
        turns(SHARED + " ", "x"),
        turns(SHARED.lower(), "x"),
        turns(SHARED[:-1], "x"),
        turns("", "x"),
        turns("Be kind.", SHARED),
        [*turns("Be kind.", "hi"), Message(role="system", content=SHARED)],
    ],
)
async def test_nothing_else_is_shared(tokenizer: PromptTokenizer, messages: list[Message]) -> None:
    assert await shared(tokenizer, messages) == 0


async def test_a_prompt_without_messages_shares_nothing(tokenizer: PromptTokenizer) -> None:
    assert await SharedPrompts(["", SHARED], {MODEL: tokenizer}).tokens_of(MODEL, [], [1, 2]) == 0


async def test_without_shareable_prompts_nothing_is_shared(tokenizer: PromptTokenizer) -> None:
    assert await shared(tokenizer, turns(SHARED, "x"), texts=()) == 0


@pytest.mark.parametrize("text", ["a", "b", "ab", "a b", "hello", "user"])
async def test_nothing_of_a_tenant_s_own_text_is_shared(tokenizer: PromptTokenizer, text: str) -> None:
    """Not even if it is what the start of all prompts was found out with."""
    count = await shared(tokenizer, turns(SHARED, text))
    assert count == await shared(tokenizer, turns(SHARED, "Something else."))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(), max_size=3))
@example(["a"])
@example(["b", "a"])
@example(["<|im_end|>"])
@example([SHARED])
@example([""])
async def test_what_is_shared_is_the_same_whatever_follows(
    tokenizer: PromptTokenizer, rest: list[str]
) -> None:
    """So no tenant's text can be told from whether its blocks are there."""
    one = turns(SHARED, *rest)
    ids = await tokenizer.encode(one)
    count = await shared(tokenizer, one)
    for other in ("a", "b", "Z", "<|im_start|>", "\n"):
        other_ids = await tokenizer.encode(turns(SHARED, other))
        other_count = await shared(tokenizer, turns(SHARED, other))
        assert ids[: min(count, other_count)] == other_ids[: min(count, other_count)]
    assert count <= await shared(tokenizer, turns(SHARED, "Something else."))


async def test_each_of_several_shareable_prompts_is_its_own(tokenizer: PromptTokenizer) -> None:
    prompts = SharedPrompts([SHARED, "Be brief."], {MODEL: tokenizer})
    counts = [
        await prompts.tokens_of(MODEL, messages, await tokenizer.encode(messages))
        for messages in [turns(SHARED, "hi"), turns("Be brief.", "hi"), turns("Be long.", "hi")]
    ]
    assert counts[0] > counts[1] > counts[2] == 0


async def test_asked_again_it_says_the_same(tokenizer: PromptTokenizer) -> None:
    prompts = SharedPrompts([SHARED], {MODEL: tokenizer, "other": tokenizer})
    messages = turns(SHARED, "hi")
    ids = await tokenizer.encode(messages)
    counts = [await prompts.tokens_of(model, messages, ids) for model in (MODEL, MODEL, "other")]
    assert counts[0] == counts[1] == counts[2] > 0


async def test_a_prompt_that_was_cut_shares_no_more_than_it_has(tokenizer: PromptTokenizer) -> None:
    prompts = SharedPrompts([SHARED], {MODEL: tokenizer})
    messages = turns(SHARED, "hi")
    ids = await tokenizer.encode(messages)
    assert await prompts.tokens_of(MODEL, messages, ids[:3]) == 3
    assert await prompts.tokens_of(MODEL, messages, []) == 0
    assert await prompts.tokens_of(MODEL, messages, [0, *ids]) == 0


async def test_control_tokens_of_the_template_before_the_user_s_text_are_shared(hf: HfTokenizer) -> None:
    messages = turns(SHARED, "hello")
    count = await shared(hf, messages)
    text = hf._backend.decode(hf.encode_now(messages)[:count], skip_special_tokens=False)
    assert text == f"<|im_start|>system\n{SHARED}<|im_end|>\n<|im_start|>user\n"


async def test_a_model_without_system_prompts_shares_nothing(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    tokenizer = HfTokenizer(model_folder(tmp_path, template=NO_SYSTEM), threads)
    prompts = SharedPrompts([SHARED], {MODEL: tokenizer})
    assert await prompts.tokens_of(MODEL, turns(SHARED, "hi"), [1, 2, 3]) == 0
