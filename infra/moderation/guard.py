"""The moderators together: one deadline, and the policy for when one of them cannot check."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Literal

from prometheus_client import Counter

from contracts.errors import ApiError, ErrorCode

from ..settings import ModerationSettings
from .protocols import Moderator, Verdict

log = logging.getLogger(__name__)

FAILED_CHECKS = Counter(
    "headrace_moderator_failures_total", "Checks a moderator could not do", ["moderator", "policy"]
)


class ModeratorFailed(Exception):
    """A moderator could not check a text: the configured ``when_unavailable`` policy applies.

    Attributes:
        reason: ``timeout``, ``nonsense`` or the class name of what it raised.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"moderator failed: {reason}")
        self.reason = reason


class ModerationGuard:
    """Asks every moderator in turn and turns their verdicts into what the client is told.

    The deadline is for all of them together. A moderator that raises, answers nonsense or does not
    answer in time has failed, and ``when_unavailable`` decides: ``closed`` ends the request with
    ``moderation_unavailable``, ``open`` goes on to the next moderator.
    """

    def __init__(self, moderators: Sequence[Moderator], settings: ModerationSettings) -> None:
        self._moderators = moderators
        self._settings = settings

    async def clear(self, texts: Sequence[str]) -> None:
        """Return if the texts may go on.

        Raises:
            ApiError: ``content_filter`` (refused), or ``moderation_unavailable``.
        """
        if not texts:
            return
        deadline = asyncio.get_running_loop().time() + self._settings.deadline_seconds
        for moderator in self._moderators:
            try:
                verdict = await _ask(moderator, texts, deadline)
            except ModeratorFailed as error:
                self._failed(moderator, error, self._settings.when_unavailable)
                continue
            if verdict.refused:
                log.info(
                    "moderation refused",
                    extra={
                        "moderator": moderator.name,
                        "category": verdict.category,
                        "reason": verdict.reason,
                    },
                )
                raise ApiError(
                    ErrorCode.CONTENT_FILTER,
                    f"The messages were refused by moderation ({verdict.category}).",
                    param="messages",
                )

    async def judge(self, texts: Sequence[str]) -> list[list[tuple[str, Verdict]]]:
        """What each moderator thinks of each text by itself, with the moderator's name.

        Raises:
            ApiError: ``moderation_unavailable``, whatever the policy: nothing is said that was not checked.
        """
        deadline = asyncio.get_running_loop().time() + self._settings.deadline_seconds
        judged: list[list[tuple[str, Verdict]]] = []
        for text in texts:
            verdicts: list[tuple[str, Verdict]] = []
            for moderator in self._moderators:
                try:
                    verdicts.append((moderator.name, await _ask(moderator, [text], deadline)))
                except ModeratorFailed as error:
                    self._failed(moderator, error, "closed")
            judged.append(verdicts)
        return judged

    def _failed(
        self, moderator: Moderator, error: ModeratorFailed, policy: Literal["closed", "open"]
    ) -> None:
        FAILED_CHECKS.labels(moderator.name, policy).inc()
        log.error(
            "moderation unavailable",
            extra={"moderator": moderator.name, "reason": error.reason, "policy": policy},
        )
        if policy == "closed":
            raise ApiError(
                ErrorCode.MODERATION_UNAVAILABLE,
                "The text could not be checked. Please try again.",
                retry_after_seconds=1,
            )


async def _ask(moderator: Moderator, texts: Sequence[str], deadline: float) -> Verdict:
    try:
        async with asyncio.timeout_at(deadline):
            verdict: object = await moderator.check(texts)
    except TimeoutError:
        raise ModeratorFailed("timeout") from None
    except Exception as error:
        raise ModeratorFailed(type(error).__name__) from error
    # The protocol is a promise; a moderator behind a network may break it. NaN fails the comparison.
    if not isinstance(verdict, Verdict) or not 0.0 <= verdict.score <= 1.0:
        raise ModeratorFailed("nonsense")
    return verdict
