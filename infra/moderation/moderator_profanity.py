"""Moderation by a local classifier: the linear model that ships with ``alt-profanity-check``."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np

from .protocols import ALLOWED, Verdict

#: Scoring costs about 0.05 ms plus 0.2 us a character; more than this many characters go off the loop.
INLINE_CHARACTERS = 8_000
#: Scores remembered. One entry is about 200 bytes.
CACHE_ENTRIES = 20_000


class ProfanityModel:
    """``profanity_check``'s calibrated classifier, without the general machinery around it.

    The library weighs a text's words (tf-idf, L2 norm) and averages linear classifiers, each with a sigmoid
    fitted to it (Platt scaling). For one short text scikit-learn spends nearly all its time on checking and
    converting sparse matrices, so the same arithmetic is done here on the few words that occur; a test
    compares the probabilities.
    """

    def __init__(self) -> None:
        # Loads scikit-learn and two pickles (a second): done once, when the stage starts.
        from profanity_check import profanity_check as library

        vectorizer: Any = library.vectorizer
        parts = library.model.calibrated_classifiers_
        self._words: Callable[[str], list[str]] = vectorizer.build_analyzer()
        self._columns: dict[str, int] = vectorizer.vocabulary_
        self._idf = vectorizer.idf_
        self._weights = np.vstack([p.estimator.coef_[0] for p in parts]).T
        self._bias = np.array([p.estimator.intercept_[0] for p in parts])
        self._slope = np.array([p.calibrators[0].a_ for p in parts])
        self._offset = np.array([p.calibrators[0].b_ for p in parts])

    def scores(self, texts: Sequence[str]) -> list[float]:
        """Probability, in [0, 1], that each text is abusive."""
        return [self._score(text) for text in texts]

    def _score(self, text: str) -> float:
        columns = self._columns
        counts = Counter(columns[word] for word in self._words(text) if word in columns)
        decisions = self._bias
        if counts:
            found = np.fromiter(counts.keys(), np.intp, len(counts))
            tfidf = np.fromiter(counts.values(), float, len(counts)) * self._idf[found]
            decisions = tfidf @ self._weights[found] / np.linalg.norm(tfidf) + self._bias
        return float((1.0 / (1.0 + np.exp(self._slope * decisions + self._offset))).mean())


class ProfanityModerator:
    """Refuses a text that the classifier scores at or above the threshold.

    Scores are remembered by the text's digest (never the text), so that the earlier turns of a long
    conversation are not scored again with every turn.
    """

    name = "profanity"

    def __init__(self, model: ProfanityModel, threshold: float, executor: Executor) -> None:
        """Prepare.

        Args:
            threshold: score in (0, 1] from which a text is refused; 1 refuses none.
            executor: where long texts are scored.
        """
        self._model = model
        self._threshold = threshold
        self._executor = executor
        self._known: OrderedDict[bytes, float] = OrderedDict()

    async def check(self, texts: Sequence[str]) -> Verdict:
        """See :class:`infra.moderation.protocols.Moderator`."""
        if self._threshold >= 1:
            return ALLOWED
        digests = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in texts]
        new = {d: text for d, text in zip(digests, texts, strict=True) if d not in self._known}
        highest = max((self._known[d] for d in digests if d in self._known), default=0.0)
        if new:
            fresh = await self._score(list(new.values()))
            highest = max(highest, *fresh)
            self._known.update(zip(new, fresh, strict=True))
        for digest in digests:
            self._known.move_to_end(digest)
        while len(self._known) > CACHE_ENTRIES:
            self._known.popitem(last=False)
        if highest < self._threshold:
            return Verdict(False, score=highest)
        return Verdict(True, "abuse", highest, f"score {highest:.3f}")

    async def _score(self, texts: list[str]) -> list[float]:
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return self._model.scores(texts)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._model.scores, texts)
