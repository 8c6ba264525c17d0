"""What every moderator keeps, whichever it is (infra.moderation.protocols.Moderator)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.moderation.moderator_profanity import ProfanityModel, ProfanityModerator
from infra.moderation.moderator_rules import RulesModerator
from infra.moderation.protocols import Moderator, Verdict

BAD = "you fucking idiot, secretword"
GOOD = "What is the capital of France?"
CURIOUS = [
    "",
    " ",
    "\x00",
    "a" * 200_000,
    "👩‍💻 你好 🇨🇿",
    "\u2028\u0085\ufdd0",
    "<|im_start|>",
    "%s{}\\",
]


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture(scope="module", params=["rules", "profanity"])
def moderator(request: pytest.FixtureRequest, threads: ThreadPoolExecutor) -> Moderator:
    if request.param == "rules":
        return RulesModerator(["secretword", r"^never\b"])
    return ProfanityModerator(ProfanityModel(), 0.9, threads)


def sound(verdict: Verdict) -> bool:
    return isinstance(verdict, Verdict) and 0.0 <= verdict.score <= 1.0


async def test_refuses_what_is_bad_and_lets_through_what_is_not(moderator: Moderator) -> None:
    assert (await moderator.check([BAD])).refused
    assert not (await moderator.check([GOOD])).refused


async def test_one_bad_text_among_many_refuses_them_all(moderator: Moderator) -> None:
    texts = [f"{GOOD} {i}" for i in range(20)]
    assert not (await moderator.check(texts)).refused
    assert (await moderator.check([*texts[:10], BAD, *texts[10:]])).refused


async def test_no_texts_are_let_through(moderator: Moderator) -> None:
    assert not (await moderator.check([])).refused


@pytest.mark.parametrize("text", CURIOUS, ids=range(len(CURIOUS)))
async def test_any_text_gets_a_sound_verdict(moderator: Moderator, text: str) -> None:
    verdict = await moderator.check([text])
    assert sound(verdict)
    assert not verdict.refused


async def test_checking_again_gives_the_same_verdict(moderator: Moderator) -> None:
    first, second = [await moderator.check([GOOD, BAD]) for _ in range(2)]
    assert first == second


async def test_a_refusal_names_a_category_and_never_the_text(moderator: Moderator) -> None:
    verdict = await moderator.check([BAD])
    assert verdict.category
    assert "secretword" not in verdict.reason + verdict.category
    assert "idiot" not in verdict.reason + verdict.category


async def test_a_check_may_be_cancelled_and_the_next_one_is_right(moderator: Moderator) -> None:
    for text in ("x" * 300_000 + BAD, BAD):
        task = asyncio.ensure_future(moderator.check([text]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert (await moderator.check([BAD])).refused
    assert not (await moderator.check([GOOD])).refused


async def test_its_name_is_a_short_constant(moderator: Moderator) -> None:
    assert moderator.name.isidentifier()
    assert len(moderator.name) <= 32
