"""Moderation by the operator's own patterns."""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import Iterator, Sequence

from ..settings import SettingsError
from .protocols import ALLOWED, Verdict

#: Characters searched in one go. Between two pieces the event loop gets its turn.
PIECE = 64 * 1024
#: Characters that consecutive pieces share, so that a match up to this long is found across their border.
OVERLAP = 1024


class RulesModerator:
    """Refuses a text that matches one of ``moderation.blocked_patterns``.

    Both the text as it came and its NFKC form are searched, so that full-width or ligature spellings do
    not slip through.
    """

    name = "rules"

    def __init__(self, patterns: Sequence[str]) -> None:
        """Compile the patterns once.

        Raises:
            SettingsError: names the pattern that is no regular expression.
        """
        self._patterns: list[re.Pattern[str]] = []
        for index, pattern in enumerate(patterns):
            try:
                self._patterns.append(re.compile(pattern, re.IGNORECASE))
            except re.error as error:
                raise SettingsError(
                    f"configuration: moderation.blocked_patterns.{index}: {error}"
                ) from None

    async def check(self, texts: Sequence[str]) -> Verdict:
        """See :class:`infra.moderation.protocols.Moderator`."""
        if not self._patterns:
            return ALLOWED
        for text in texts:
            for form in _forms(text):
                for piece, (start, end) in enumerate(_pieces(len(form))):
                    if piece:
                        await asyncio.sleep(0)
                    found = self._search(form, start, end)
                    if found is not None:
                        return Verdict(True, "blocked_pattern", 1.0, f"pattern {found}")
        return ALLOWED

    def _search(self, text: str, start: int, end: int) -> int | None:
        return next(
            (i for i, pattern in enumerate(self._patterns) if pattern.search(text, start, end)), None
        )


def _forms(text: str) -> Iterator[str]:
    yield text
    if not text.isascii() and not unicodedata.is_normalized("NFKC", text):
        yield unicodedata.normalize("NFKC", text)


def _pieces(length: int) -> Iterator[tuple[int, int]]:
    start = 0
    while True:
        end = min(start + PIECE, length)
        yield start, end
        if end == length:
            return
        start = end - OVERLAP
