"""A caller's limits as the OpenAI API's response headers."""

from __future__ import annotations

import math
from typing import Final

from contracts.limits import Allowance, RateLimits

#: What the headers say, for the OpenAPI document.
RATE_LIMIT_HEADERS: Final = {
    f"x-ratelimit-{part}-{kind}": text.format(kind)
    for kind in ("requests", "tokens")
    for part, text in (
        ("limit", "The caller's limit of {} a minute."),
        ("remaining", "What is left of it."),
        ("reset", "When it is whole again, as in 6m0s."),
    )
}


def limit_headers(rate_limits: RateLimits) -> dict[str, str]:
    """``x-ratelimit-{limit,remaining,reset}-{requests,tokens}``; kinds without a limit are absent."""
    headers: dict[str, str] = {}
    for kind, allowance in (("requests", rate_limits.requests), ("tokens", rate_limits.tokens)):
        if allowance is not None:
            headers |= _headers(kind, allowance)
    return headers


def _headers(kind: str, allowance: Allowance) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{kind}": str(allowance.limit),
        f"x-ratelimit-remaining-{kind}": str(allowance.remaining),
        f"x-ratelimit-reset-{kind}": duration(allowance.reset_seconds),
    }


def duration(seconds: float) -> str:
    """Whole seconds, rounded up, as that API writes them: ``1s``, ``6m0s``."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
