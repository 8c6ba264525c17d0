"""``/v1/moderations``: what the moderators of the pipeline think of texts, in the OpenAI API's shape.

What the classifier refuses is shown as ``harassment``, what the operator's patterns refuse as ``illicit``.
What no moderator judges is false with a score of 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, get_args

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from contracts.errors import ApiError, ErrorCode
from infra.moderation.guard import ModerationGuard
from infra.moderation.protocols import Verdict
from infra.settings import ModerationSettings

from .chat_messages import is_unicode, parse_text
from .refusals import invalid

MODEL: Final = "headrace-moderation"
MAX_INPUTS: Final = 128
#: Names that clients of the OpenAI API ask for; all mean what there is.
_MODELS: Final = (
    MODEL,
    "omni-moderation-latest",
    "omni-moderation-2024-09-26",
    "text-moderation-latest",
    "text-moderation-stable",
)
Category = Literal[
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/intent",
    "self-harm/instructions",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
]
CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)
#: The category that each moderator's verdicts belong to, by the moderator's name.
_SHOWN_AS: Final[dict[str, Category]] = {"profanity": "harassment", "rules": "illicit"}

_TEXT: Final = {"type": "string"}
_PART: Final = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
}
BODY_SCHEMA: Final[dict[str, Any]] = {
    "title": "ModerationRequest",
    "type": "object",
    "required": ["input"],
    "properties": {
        "input": {
            "anyOf": [
                _TEXT,
                {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": _TEXT},
                {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": _PART},
            ]
        },
        "model": {"enum": [None, *_MODELS]},
    },
}

_CLOSED: Final = ConfigDict(extra="forbid")


@with_config(_CLOSED)
class ModerationResult(TypedDict):
    """What is thought of one input; each part has every category."""

    flagged: bool
    categories: dict[Category, bool]
    category_scores: dict[Category, float]
    category_applied_input_types: dict[Category, list[Literal["text"]]]


@with_config(_CLOSED)
class Moderation(TypedDict):
    """What is thought of each input."""

    id: str
    model: str
    results: list[ModerationResult]


def parse_inputs(body: object) -> list[str]:
    """The texts of a body, one for each result.

    A list of text parts is one input, as the API has it.

    Raises:
        ApiError: 400 that names the field, 404 for an unknown model.
    """
    if not isinstance(body, dict):
        raise ApiError(ErrorCode.INVALID_REQUEST, "The body must be a JSON object.")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise invalid("model", "must be the name of a model.")
    if model is not None and model not in _MODELS:
        raise ApiError(
            ErrorCode.MODEL_NOT_FOUND, f"The model does not exist; use '{MODEL}'.", param="model"
        )
    raw = body.get("input")
    if isinstance(raw, list):
        if not 1 <= len(raw) <= MAX_INPUTS:
            raise invalid("input", f"must hold 1 to {MAX_INPUTS} texts.")
        if not isinstance(raw[0], str):
            return [parse_text(raw, "input")]
    given = raw if isinstance(raw, list) else [raw]
    texts = [text for text in given if isinstance(text, str) and is_unicode(text)]
    if len(texts) < len(given):
        raise invalid("input", "must be a string, a list of strings or a list of text parts.")
    return texts


def moderation_result(verdicts: Sequence[tuple[str, Verdict]]) -> ModerationResult:
    """What is shown of the verdicts about one text, each with its moderator's name."""
    flags = dict.fromkeys(CATEGORIES, False)
    scores = dict.fromkeys(CATEGORIES, 0.0)
    for moderator, verdict in verdicts:
        category = _SHOWN_AS[moderator]
        flags[category] |= verdict.refused
        scores[category] = max(scores[category], verdict.score)
    return {
        "flagged": any(flags.values()),
        "categories": flags,
        "category_scores": scores,
        "category_applied_input_types": {category: ["text"] for category in CATEGORIES},
    }


def _make_guard(settings: ModerationSettings, threads: ThreadPoolExecutor) -> ModerationGuard:
    # Here, not above: it loads numpy and scikit-learn, which most gateways never need.
    from infra.moderation.moderators import make_guard

    return make_guard(settings, threads)


class ModerationDesk:
    """The moderators, loaded when they are first asked for: few gateways are, and they take 100 MB."""

    def __init__(
        self,
        settings: ModerationSettings,
        make: Callable[[ModerationSettings, ThreadPoolExecutor], ModerationGuard] = _make_guard,
    ) -> None:
        self._settings = settings
        self._make = make
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="moderations")
        self._loading = asyncio.Lock()
        self._guard: ModerationGuard | None = None

    async def judge(self, texts: Sequence[str]) -> list[ModerationResult]:
        """What is thought of each text.

        Raises:
            ApiError: ``moderation_unavailable``.
        """
        async with self._loading:
            if self._guard is None:
                self._guard = await asyncio.to_thread(self._make, self._settings, self._threads)
        return [moderation_result(verdicts) for verdicts in await self._guard.judge(texts)]

    def close(self) -> None:
        """Give up the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
