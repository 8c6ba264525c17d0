"""What a request gets at its pool's step of the overload ladder (docs/OVERLOAD.md).

The schedulers decide the step; here it is applied, when a request is accepted. Decisions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import redis.asyncio as redis

from contracts.degraded import Degraded, OverloadLevel, OverloadStep
from contracts.errors import ApiError, ErrorCode
from contracts.identity import Principal
from contracts.records import Message, Sampling
from contracts.tiers import QueueClass
from infra.overload_redis import OverloadBoard
from infra.settings import ModelSettings, OverloadSettings, Settings, TierSettings
from infra.telemetry import DEGRADED

from .chat_request import ChatRequest, tier_of
from .fresh_copy import FreshCopy

#: Tokens a chat template may add: per message, and once (a default system message).
_TOKENS_PER_MESSAGE: Final = 16
_TOKENS_ONCE: Final = 64

Levels = Mapping[str, OverloadLevel]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request is accepted for.

    Attributes:
        model / pool: what serves it.
        max_wait_seconds: it is ended as expired when it has not started by then.
        max_tokens_cap: bound of its output tokens per choice beyond what it asks for; None = none.
        degraded: what it gets less of; None = nothing.
    """

    model: str
    pool: str
    max_wait_seconds: float
    max_tokens_cap: int | None = None
    degraded: Degraded | None = None


class Degradation:
    """Applies the pools' levels to requests; follows them through a copy in this process."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self._settings = settings
        self._levels = FreshCopy(OverloadBoard(client).read)

    def reconfigure(self, settings: Settings) -> None:
        """Go by these settings from the next request on."""
        self._settings = settings

    async def close(self) -> None:
        """End what goes on in the background."""
        await self._levels.close()

    async def terms(
        self, principal: Principal, request: ChatRequest, messages: Sequence[Message]
    ) -> Terms:
        """What this request gets now. Counts what is less than asked for.

        Args:
            messages: the whole prompt.

        Raises:
            ApiError: ``overloaded``: it is refused, with the time after which to try again.
            StreamsUnavailable: Redis cannot be reached.
        """
        levels = await self._levels.get()
        try:
            terms = terms_of(principal, request, messages, self._settings, levels)
        except Refused as refused:
            DEGRADED.labels(refused.step.value, principal.tier).inc()
            raise
        if terms.degraded is not None:
            DEGRADED.labels(terms.degraded.step, principal.tier).inc()
        return terms


class Refused(ApiError):
    """The ladder's last steps: 429."""

    def __init__(self, step: OverloadStep, retry_after_seconds: int) -> None:
        super().__init__(
            ErrorCode.OVERLOADED,
            "There are more requests than can be served right now; try again later.",
            retry_after_seconds=retry_after_seconds,
        )
        self.step = step


def terms_of(
    principal: Principal,
    request: ChatRequest,
    messages: Sequence[Message],
    settings: Settings,
    levels: Levels,
) -> Terms:
    """What a request gets, given the levels of the pools (an absent one has normal service).

    Raises:
        Refused: its class is refused.
    """
    tier = tier_of(settings, principal)
    pool = request.model_settings.pool
    level = levels.get(pool, OverloadLevel())
    plain = Terms(request.model, pool, tier.max_wait_seconds)
    match tier.queue_class:
        case QueueClass.STANDARD if level.step.reaches(OverloadStep.STANDARD_WAITS):
            return _standard(tier, request, messages, settings, levels, level)
        case QueueClass.INTERACTIVE if level.step.reaches(OverloadStep.INTERACTIVE_REFUSED):
            raise Refused(OverloadStep.INTERACTIVE_REFUSED, settings.overload.retry_after_seconds)
        case QueueClass.BATCH if level.step.reaches(OverloadStep.BATCH_PAUSED):
            degraded = Degraded(step=OverloadStep.BATCH_PAUSED.value, reason=level.reason)
            return replace(plain, degraded=degraded)
    return plain


def _standard(
    tier: TierSettings,
    request: ChatRequest,
    messages: Sequence[Message],
    settings: Settings,
    levels: Levels,
    level: OverloadLevel,
) -> Terms:
    """A request of a standard tier on a pool that is at least at "standard waits"."""
    overload = settings.overload
    model, pool, cap = request.model, request.model_settings.pool, None
    step = OverloadStep.STANDARD_WAITS
    smaller = None
    if level.step.reaches(OverloadStep.STANDARD_SMALLER_MODEL):
        smaller = _smaller_model(request, messages, settings, levels)
    if smaller is not None:
        # It burdens the overloaded pool no more, so nothing further is taken from it.
        model, pool = smaller
        step = OverloadStep.STANDARD_SMALLER_MODEL
    elif level.step.reaches(OverloadStep.STANDARD_REFUSED):
        raise Refused(OverloadStep.STANDARD_REFUSED, overload.retry_after_seconds)
    elif level.step.reaches(OverloadStep.STANDARD_SHORTER):
        cap = shorter(request.sampling, request.model_settings, overload)
        step = step if cap is None else OverloadStep.STANDARD_SHORTER
    wait = tier.max_wait_seconds * overload.wait_factor
    return Terms(model, pool, wait, cap, Degraded(step=step.value, reason=level.reason))


def shorter(sampling: Sampling, model: ModelSettings, overload: OverloadSettings) -> int | None:
    """Output tokens per choice of a reply made shorter; None for one that is short already."""
    asked = sampling.max_tokens if sampling.max_tokens is not None else model.default_max_tokens
    least = max(overload.shrink_floor, sampling.min_tokens)
    cap = max(least, math.ceil(asked * overload.shrink_factor))
    return cap if cap < asked else None


def _smaller_model(
    request: ChatRequest, messages: Sequence[Message], settings: Settings, levels: Levels
) -> tuple[str, str] | None:
    """The first model down the chain of fallbacks that has room and takes this request, and its pool."""
    if request.sampling.logit_bias:
        return None  # its token ids are those of one model's vocabulary
    tokens = most_tokens(request.sampling, messages)
    for name, model in _fallbacks(request.model_settings, settings):
        level = levels.get(model.pool, OverloadLevel())
        has_room = not level.step.reaches(OverloadStep.STANDARD_SMALLER_MODEL)
        if has_room and tokens <= model.context_length:
            return name, model.pool
    return None


def _fallbacks(model: ModelSettings, settings: Settings) -> Iterator[tuple[str, ModelSettings]]:
    while model.fallback is not None:
        name, model = model.fallback, settings.models[model.fallback]
        yield name, model


def most_tokens(sampling: Sampling, messages: Sequence[Message]) -> int:
    """A bound of the context a request needs, without its tokenizer: a token is at least one byte of UTF-8.

    Too careful for long prompts, which then stay with their model: a fallback must never be what a request
    fails for.
    """
    prompt = sum(len(m.content.encode()) + _TOKENS_PER_MESSAGE for m in messages) + _TOKENS_ONCE
    return prompt + max(sampling.max_tokens or 1, sampling.min_tokens)
