"""Limits at admission: what a request takes of them, and what its caller is told (docs/LIMITS.md).

A concurrency permit is worth as much as the token stream behind it: where permits are short, those whose
streams have ended are taken back, so that a reply which is over frees its permit at that moment, whoever
died. Tokens are reserved here and settled by the history stage, from the request's outcome.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from contracts.errors import ApiError, ErrorCode
from contracts.identity import Principal
from contracts.limits import RateLimits
from contracts.records import Message
from contracts.stream_ids import StreamId
from contracts.tiers import QueueClass
from contracts.token_stream import StreamsUnavailable
from infra.limits_redis import LimitCounters, LimitKind, LimitReached, LimitScope
from infra.settings import Settings, TierSettings
from infra.telemetry import LIMITED

from .chat_request import ChatRequest, tier_of
from .request_times import created_ms_of

#: A prompt's tokens are not known before it is moderated. Fewer bytes to a token are rare.
_BYTES_PER_TOKEN: Final = 3
_TOKENS_PER_MESSAGE: Final = 8
_NOT_OF_BATCHES: Final = ("requests_per_minute", "tokens_per_minute", "concurrent")
#: A permit is taken before its stream is made; a stream that is not there after so long never will be.
_CREATING_MS: Final = 30_000

_CODES: Final = {
    LimitKind.REQUESTS_PER_MINUTE: (ErrorCode.REQUESTS_LIMIT, "requests per minute"),
    LimitKind.TOKENS_PER_MINUTE: (ErrorCode.TOKENS_LIMIT, "tokens per minute"),
    LimitKind.CONCURRENT: (ErrorCode.CONCURRENCY_LIMIT, "requests at the same time"),
    LimitKind.REQUESTS_PER_DAY: (ErrorCode.DAILY_QUOTA, "requests per day"),
    LimitKind.TOKENS_PER_DAY: (ErrorCode.DAILY_QUOTA, "tokens per day"),
    LimitKind.ENQUEUED_TOKENS: (ErrorCode.ENQUEUED_LIMIT, "tokens of unfinished requests"),
}


class Streams(Protocol):
    """Where it is seen whether requests have ended."""

    async def last_ids(self, request_ids: Sequence[str]) -> list[StreamId | None]:
        """Id of each stream's last entry; None where there is no stream."""


def scopes_of(settings: Settings, principal: Principal) -> list[LimitScope]:
    """The scopes in which a caller has limits: its key, its tenant, its tier.

    A tenant has batches beside other requests: its enqueued tokens bound the batches, its permits and limits
    per minute the others. A key whose lines count as another tier than its calls has its limits once for
    each.
    """
    tier = tier_of(settings, principal)
    key = next((key for key in settings.keys if key.id == principal.key_id), None)
    own = key.limits if key is not None else None
    name = f"key:{principal.key_id}"
    if key is not None and key.tier != principal.tier:
        name = f"lines:{principal.key_id}"
        own = own.model_copy(update=dict.fromkeys(_NOT_OF_BATCHES)) if own is not None else None
    tenant = settings.tenants.get(principal.tenant)
    scopes = [
        LimitScope(name, own if own is not None else tier.limits),
        LimitScope(f"tier:{principal.tier}", tier.tier_limits),
    ]
    if tenant is not None:
        others = _NOT_OF_BATCHES if tier.queue_class is QueueClass.BATCH else ("enqueued_tokens",)
        limits = tenant.limits.model_copy(update=dict.fromkeys(others))
        scopes.append(LimitScope(f"tenant:{principal.tenant}", limits))
    return [scope for scope in scopes if scope.limits.any]


def longest_life(settings: Settings, tier: TierSettings) -> float:
    """Seconds after which a request has ended for certain: its wait, longer under overload, and its reply."""
    wait = tier.max_wait_seconds
    if tier.queue_class is QueueClass.STANDARD:
        wait *= settings.overload.wait_factor
    return wait + settings.streams.open_ttl_seconds


def most_tokens(request: ChatRequest, messages: Sequence[Message]) -> int:
    """What is reserved for a request: its prompt by its bytes, and all the output it may have."""
    prompt = sum(len(m.content.encode()) // _BYTES_PER_TOKEN + _TOKENS_PER_MESSAGE for m in messages)
    sampling = request.sampling
    output = (
        sampling.max_tokens
        if sampling.max_tokens is not None
        else request.model_settings.default_max_tokens
    )
    return prompt + sampling.n * output


class Limits:
    """Takes requests' parts of the limits, and gives them back."""

    def __init__(
        self,
        counters: LimitCounters,
        streams: Streams,
        settings: Settings,
        now_ms: Callable[[], int],
    ) -> None:
        self._counters = counters
        self._streams = streams
        self._settings = settings
        self._now_ms = now_ms
        self._bound = LocalBound()
        # As many as there are keys.
        self._scopes: dict[Principal, list[LimitScope]] = {}

    def reconfigure(self, settings: Settings) -> None:
        """Go by these settings from the next request on; what is counted stays."""
        self._settings = settings
        self._scopes.clear()

    async def take(
        self,
        principal: Principal,
        request: ChatRequest,
        messages: Sequence[Message],
        request_id: str,
    ) -> RateLimits | None:
        """Take a request's part of all limits of its caller, or nothing; None where it has no limits.

        Args:
            messages: the whole prompt.

        Raises:
            ApiError: a limit is reached, or limits cannot be counted and its tier goes without (503).
        """
        scopes = self._scopes.get(principal)
        if scopes is None:
            scopes = self._scopes[principal] = scopes_of(self._settings, principal)
        if not scopes:
            return None
        tier = tier_of(self._settings, principal)
        tokens = most_tokens(request, messages)
        lapse_ms = int(longest_life(self._settings, tier) * 1000)
        try:
            found = await self._counters.take(request_id, scopes, tokens, lapse_ms)
            if isinstance(found, LimitReached) and found.held:
                ended = await self._ended(found.held)
                if ended:
                    found = await self._counters.take(request_id, scopes, tokens, lapse_ms, ended)
        except StreamsUnavailable:
            if tier.when_limits_unavailable == "closed":
                raise ApiError(
                    ErrorCode.UNAVAILABLE,
                    "Limits cannot be checked right now; try again.",
                    retry_after_seconds=1,
                ) from None
            self._go_uncounted(principal, tier.open_requests_per_minute)
            return None
        if isinstance(found, LimitReached):
            LIMITED.labels(found.kind.name.lower(), principal.tier).inc()
            raise _refusal(found)
        return found

    async def give_back(self, request_id: str) -> None:
        """The request was not accepted after all.

        Raises:
            StreamsUnavailable: its part lapses by itself.
        """
        await self._counters.undo(request_id)

    async def _ended(self, held: Sequence[str]) -> list[str]:
        last_ids = await self._streams.last_ids(held)
        old_ms = self._now_ms() - _CREATING_MS
        return [
            request_id
            for request_id, last in zip(held, last_ids, strict=True)
            if (created_ms_of(request_id) < old_ms if last is None else last.is_seal)
        ]

    def _go_uncounted(self, principal: Principal, per_minute: int) -> None:
        wait = self._bound.take(principal.key_id, per_minute, self._now_ms() / 1000)
        if wait > 0:
            LIMITED.labels("uncounted", principal.tier).inc()
            raise ApiError(
                ErrorCode.REQUESTS_LIMIT,
                "Limits cannot be counted right now, and this is all that goes without; try again later.",
                retry_after_seconds=math.ceil(wait),
            )


def _refusal(reached: LimitReached) -> ApiError:
    code, what = _CODES[reached.kind]
    if reached.retry_ms is None:
        return ApiError(
            ErrorCode.EXCEEDS_LIMIT,
            f"The request is larger than your limit of {what}.",
            param="max_tokens",
            rate_limits=reached.rate_limits,
        )
    return ApiError(
        code,
        f"Your limit of {what} is reached; try again later.",
        retry_after_seconds=max(1, math.ceil(reached.retry_ms / 1000)),
        rate_limits=reached.rate_limits,
    )


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class LocalBound:
    """A token bucket for each key in this process, for the time in which nothing can be counted.

    Holds as many buckets as there are keys, which the configuration bounds.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}

    def take(self, key_id: str, per_minute: int, now: float) -> float:
        """Take one request; 0, or seconds until there is one.

        Args:
            now: seconds.
        """
        bucket = self._buckets.setdefault(key_id, _Bucket(per_minute, now))
        rate = per_minute / 60
        bucket.tokens = min(per_minute, bucket.tokens + max(0.0, now - bucket.at) * rate)
        bucket.at = now
        if bucket.tokens < 1:
            return (1 - bucket.tokens) / rate
        bucket.tokens -= 1
        return 0.0
