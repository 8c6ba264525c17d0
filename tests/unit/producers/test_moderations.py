"""What ``/v1/moderations`` takes and shows."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai.types import ModerationCreateResponse

from contracts.errors import ApiError, ErrorCode
from infra.moderation.guard import ModerationGuard
from infra.moderation.moderator_rules import RulesModerator
from infra.moderation.protocols import ALLOWED, Verdict
from infra.settings import ModerationSettings
from producers.moderations import CATEGORIES, ModerationDesk, moderation_result, parse_inputs


class Abuse:
    """Stands in for the classifier, which takes a second to load."""

    name = "profanity"

    async def check(self, texts: Sequence[str]) -> Verdict:
        score = 0.95 if "idiot" in texts[0] else 0.25
        return Verdict(score > 0.9, "abuse", score)


def desk(loaded: list[int]) -> ModerationDesk:
    def make(settings: ModerationSettings, threads: ThreadPoolExecutor) -> ModerationGuard:
        loaded.append(1)
        return ModerationGuard([RulesModerator(["secret"]), Abuse()], settings)

    return ModerationDesk(ModerationSettings(), make)


async def test_each_text_gets_a_result_and_the_moderators_are_loaded_once() -> None:
    loaded: list[int] = []
    moderators = desk(loaded)
    fine, abuse, blocked = await moderators.judge(["hello", "you idiot", "a SECRET"])
    again = await moderators.judge(["hello"])
    moderators.close()
    assert loaded == [1]
    assert again == [fine]
    assert [r["flagged"] for r in (fine, abuse, blocked)] == [False, True, True]
    assert [c for c in CATEGORIES if abuse["categories"][c]] == ["harassment"]
    assert [c for c in CATEGORIES if blocked["categories"][c]] == ["illicit"]
    assert fine["category_scores"]["harassment"] == 0.25


def test_a_result_has_every_category_of_the_api_and_what_nobody_judges_is_zero() -> None:
    result: Any = moderation_result([("rules", ALLOWED), ("profanity", Verdict(True, "abuse", 1.0))])
    shown = ModerationCreateResponse.model_validate({"id": "x", "model": "m", "results": [result]})
    for part in (shown.results[0].categories, shown.results[0].category_scores):
        assert len(part.model_dump()) == len(CATEGORIES)
    assert {c for c, score in result["category_scores"].items() if score} == {"harassment"}


@pytest.mark.parametrize(
    ("raw", "texts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], ["a\nb"]),
    ],
)
def test_inputs_are_a_text_texts_or_the_parts_of_one(raw: object, texts: list[str]) -> None:
    for model in (None, "headrace-moderation", "omni-moderation-latest"):
        assert parse_inputs({"input": raw, "model": model}) == texts


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ([], ErrorCode.INVALID_REQUEST, None),
        ({}, ErrorCode.INVALID_VALUE, "input"),
        ({"input": None}, ErrorCode.INVALID_VALUE, "input"),
        ({"input": []}, ErrorCode.INVALID_VALUE, "input"),
        ({"input": ["x"] * 129}, ErrorCode.INVALID_VALUE, "input"),
        ({"input": ["x", 1]}, ErrorCode.INVALID_VALUE, "input"),
        ({"input": "\ud83d"}, ErrorCode.INVALID_VALUE, "input"),
        ({"input": [{"type": "image_url", "image_url": {}}]}, ErrorCode.UNSUPPORTED, "input[0]"),
        ({"input": [{"type": "text", "text": "x"}, "y"]}, ErrorCode.INVALID_VALUE, "input[1]"),
        ({"input": "x", "model": 1}, ErrorCode.INVALID_VALUE, "model"),
        ({"input": "x", "model": "gpt\n"}, ErrorCode.MODEL_NOT_FOUND, "model"),
    ],
)
def test_a_body_that_is_none_is_refused_by_name_C10_A11_N10(
    body: object, code: ErrorCode, param: str | None
) -> None:
    with pytest.raises(ApiError) as refused:
        parse_inputs(body)
    assert (refused.value.code, refused.value.body.param) == (code, param)
