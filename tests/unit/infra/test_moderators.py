"""The rules and the classifier."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.moderation import moderator_profanity
from infra.moderation.moderator_profanity import ProfanityModel, ProfanityModerator
from infra.moderation.moderator_rules import OVERLAP, PIECE, RulesModerator
from infra.settings import SettingsError


async def test_a_pattern_refuses_whatever_its_case_and_names_itself_not_the_text() -> None:
    verdict = await RulesModerator(["nothing", r"launch\s+codes"]).check(
        ["fine", "The LAUNCH  codes, now"]
    )
    assert verdict.refused
    assert verdict.score == 1.0
    assert verdict.reason == "pattern 1"


async def test_text_that_matches_no_pattern_goes_on() -> None:
    assert not (await RulesModerator(["secret"]).check(["all is public", ""])).refused


async def test_no_patterns_refuse_nothing() -> None:
    assert not (await RulesModerator([]).check(["anything"])).refused


async def test_full_width_spelling_does_not_slip_through() -> None:
    assert (await RulesModerator(["secret"]).check(["tell me the ｓｅｃｒｅｔ"])).refused


@pytest.mark.parametrize("position", [PIECE - 3, PIECE, 2 * PIECE - OVERLAP - 3, 3 * PIECE])
async def test_a_match_is_found_wherever_it_lies_in_a_long_text(position: int) -> None:
    text = "a" * position + "forbidden" + "b" * 1000
    assert (await RulesModerator(["forbidden"]).check([text])).refused


def test_a_broken_pattern_is_a_configuration_error_that_names_it() -> None:
    with pytest.raises(SettingsError, match=r"moderation\.blocked_patterns\.1"):
        RulesModerator(["fine", "(broken"])


@pytest.fixture(scope="module")
def model() -> ProfanityModel:
    return ProfanityModel()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


TEXTS = [
    "",
    "I will kill you",
    "how do I kill a process in linux",
    "What is the capital of France?",
    "you are a stupid idiot",
    "👩‍💻 你好 ďábel",
    "fuck " * 50,
]


def test_scores_equal_those_of_the_library(model: ProfanityModel) -> None:
    from profanity_check import predict_prob

    words = random.Random(7)
    texts = [*TEXTS, *(" ".join(words.choices(" ".join(TEXTS).split(), k=30)) for _ in range(50))]
    assert model.scores(texts) == pytest.approx(list(predict_prob(texts)), abs=1e-12)


async def test_refuses_from_the_threshold_on(model: ProfanityModel, threads: ThreadPoolExecutor) -> None:
    score = model.scores(["I will kill you"])[0]
    at = ProfanityModerator(model, score, threads)
    above = ProfanityModerator(model, score + 1e-6, threads)
    assert (await at.check(["hello", "I will kill you"])).refused
    assert not (await above.check(["I will kill you"])).refused


async def test_threshold_one_refuses_nothing(model: ProfanityModel, threads: ThreadPoolExecutor) -> None:
    assert not (await ProfanityModerator(model, 1.0, threads).check(["fuck you"])).refused


class Counting:
    """A model that scores by length and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def scores(self, texts: list[str]) -> list[float]:
        self.asked += texts
        return [min(1.0, len(t) / 100) for t in texts]


async def test_the_earlier_turns_of_a_conversation_are_not_scored_again(
    threads: ThreadPoolExecutor,
) -> None:
    counting = Counting()
    moderator = ProfanityModerator(counting, 0.9, threads)  # type: ignore[arg-type]
    conversation: list[str] = []
    for turn in range(5):
        conversation.append(f"turn {turn}")
        assert not (await moderator.check(conversation)).refused
    assert counting.asked == conversation


async def test_a_refused_text_is_refused_again_from_memory(threads: ThreadPoolExecutor) -> None:
    counting = Counting()
    moderator = ProfanityModerator(counting, 0.5, threads)  # type: ignore[arg-type]
    bad = "x" * 80
    for _ in range(3):
        assert (await moderator.check(["fine", bad])).refused
    assert counting.asked == ["fine", bad]


async def test_the_memory_of_scores_is_bounded(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moderator_profanity, "CACHE_ENTRIES", 10)
    counting = Counting()
    moderator = ProfanityModerator(counting, 0.9, threads)  # type: ignore[arg-type]
    for i in range(30):
        await moderator.check([f"text {i}"])
    assert len(moderator._known) == 10
    await moderator.check(["text 29"])
    assert len(counting.asked) == 30
    await moderator.check(["text 0"])
    assert len(counting.asked) == 31


async def test_long_text_is_scored_in_the_executor(threads: ThreadPoolExecutor) -> None:
    class Thread(Counting):
        def scores(self, texts: list[str]) -> list[float]:
            import threading

            self.asked.append(threading.current_thread().name)
            return [0.0 for _ in texts]

    counting = Thread()
    moderator = ProfanityModerator(counting, 0.9, threads)  # type: ignore[arg-type]
    await moderator.check(["short"])
    await moderator.check(["l" * (moderator_profanity.INLINE_CHARACTERS + 1)])
    assert counting.asked[0] == "MainThread"
    assert counting.asked[1] != "MainThread"
