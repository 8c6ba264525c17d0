"""M4, M5: a moderator that cannot check, under both policies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest

from contracts.errors import ApiError, ErrorCode
from infra.moderation.guard import ModerationGuard
from infra.moderation.protocols import ALLOWED, Verdict
from infra.settings import ModerationSettings


class Fake:
    name = "fake"

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer
        self.asked = 0

    async def check(self, texts: Sequence[str]) -> Any:
        self.asked += 1
        result = self.answer()
        return await result if asyncio.iscoroutine(result) else result


def _raise(error: Exception) -> Any:
    raise error


BROKEN: dict[str, Callable[[], Any]] = {
    "raises": lambda: _raise(RuntimeError("500")),
    "dead": lambda: _raise(ConnectionRefusedError()),
    "its own timeout": lambda: _raise(TimeoutError()),
    "invalid JSON": lambda: _raise(ValueError("not JSON")),
    "none": lambda: None,
    "empty list": list,
    "a bare boolean": lambda: False,
    "no number": lambda: Verdict(False, score=float("nan")),
    "beyond one": lambda: Verdict(False, score=7.0),
    "never answers": lambda: asyncio.sleep(3600, ALLOWED),
}


def settings(policy: Literal["closed", "open"]) -> ModerationSettings:
    return ModerationSettings(deadline_seconds=0.05, when_unavailable=policy)


@pytest.mark.parametrize("fault", BROKEN)
async def test_m4_m5_closed_tells_the_client_503_whatever_the_fault(fault: str) -> None:
    guard = ModerationGuard([Fake(BROKEN[fault])], settings("closed"))
    with pytest.raises(ApiError) as caught:
        await guard.clear(["hello"])
    assert caught.value.code is ErrorCode.MODERATION_UNAVAILABLE
    assert caught.value.status == 503


@pytest.mark.parametrize("fault", BROKEN)
async def test_m4_m5_open_lets_through_whatever_the_fault(fault: str) -> None:
    await ModerationGuard([Fake(BROKEN[fault])], settings("open")).clear(["hello"])


async def test_m4_open_still_asks_the_moderators_that_work() -> None:
    refusing = Fake(lambda: Verdict(True, "abuse", 0.99))
    guard = ModerationGuard([Fake(BROKEN["raises"]), refusing], settings("open"))
    with pytest.raises(ApiError) as caught:
        await guard.clear(["hello"])
    assert caught.value.code is ErrorCode.CONTENT_FILTER


async def test_a_refusal_is_a_400_that_names_the_category_and_not_the_text() -> None:
    guard = ModerationGuard([Fake(lambda: Verdict(True, "abuse", 0.99))], settings("closed"))
    with pytest.raises(ApiError) as caught:
        await guard.clear(["a very bad text"])
    assert caught.value.status == 400
    assert caught.value.body.code == "content_filter"
    assert caught.value.body.param == "messages"
    assert "abuse" in caught.value.body.message
    assert "very bad" not in caught.value.body.message


async def test_a_refusal_ends_the_asking() -> None:
    later = Fake(lambda: ALLOWED)
    guard = ModerationGuard([Fake(lambda: Verdict(True, "abuse", 1.0)), later], settings("closed"))
    with pytest.raises(ApiError):
        await guard.clear(["x"])
    assert later.asked == 0


async def test_the_deadline_is_for_all_moderators_together() -> None:
    slow = [Fake(lambda: asyncio.sleep(0.03, ALLOWED)) for _ in range(4)]
    with pytest.raises(ApiError) as caught:
        await ModerationGuard(slow, settings("closed")).clear(["x"])
    assert caught.value.code is ErrorCode.MODERATION_UNAVAILABLE
    assert slow[3].asked == 0


async def test_being_cancelled_is_not_a_failure_of_the_moderator() -> None:
    guard = ModerationGuard([Fake(BROKEN["never answers"])], ModerationSettings(when_unavailable="open"))
    task = asyncio.ensure_future(guard.clear(["x"]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nothing_to_check_asks_nobody() -> None:
    fake = Fake(BROKEN["raises"])
    await ModerationGuard([fake], settings("closed")).clear([])
    assert fake.asked == 0


async def test_judging_tells_what_each_moderator_thinks_of_each_text() -> None:
    verdicts = iter([ALLOWED, Verdict(True, "abuse", 0.99)])
    guard = ModerationGuard([Fake(lambda: next(verdicts))], settings("closed"))
    first, second = await guard.judge(["a", "b"])
    assert [v.refused for _, v in (*first, *second)] == [False, True]


@pytest.mark.parametrize("fault", BROKEN)
async def test_judging_never_says_what_was_not_checked_not_even_where_the_policy_is_open_M4_M5(
    fault: str,
) -> None:
    guard = ModerationGuard([Fake(BROKEN[fault])], settings("open"))
    with pytest.raises(ApiError) as caught:
        await guard.judge(["hello"])
    assert caught.value.code is ErrorCode.MODERATION_UNAVAILABLE
