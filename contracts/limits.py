"""What a caller is told about its limits, and what it gets back for a request that was taken."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of one limit per minute.

    Attributes:
        limit: what a minute allows.
        remaining: what is left of it.
        reset_seconds: until all of it is there again, if nothing more is taken.
    """

    limit: int
    remaining: int
    reset_seconds: float


@dataclass(frozen=True, slots=True)
class RateLimits:
    """The caller's tightest limits, of key, tenant and tier; None = it has none of this kind."""

    requests: Allowance | None = None
    tokens: Allowance | None = None

    def as_json(self) -> dict[str, Any]:
        """For a websocket frame; kinds without a limit are absent."""
        return {name: facts for name, facts in asdict(self).items() if facts is not None}


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that was accepted.

    Attributes:
        rate_limits: what is left to the caller after it; None where it has no limits, or took nothing of
            them (a repeated call).
    """

    request_id: str
    rate_limits: RateLimits | None = None
