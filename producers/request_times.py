"""The clock of the gateway, and the times a request's reader goes by."""

from __future__ import annotations

import time
from dataclasses import dataclass

from contracts.entries import Accepted
from contracts.identity import is_request_id
from infra.settings import Settings

#: Whose business it is gets this much time first: the scheduler ends what waited too long.
_SLACK_MS = 2_000


def unix_ms() -> int:
    """Now, Unix milliseconds."""
    return time.time_ns() // 1_000_000


def created_ms_of(request_id: str) -> int:
    """Time of acceptance, which request ids begin with; 0 for what is no request id."""
    return int(request_id[9:21], 16) if is_request_id(request_id) else 0


@dataclass(frozen=True, slots=True)
class ReplyFacts:
    """What a reader of a reply knows before it reads.

    Attributes:
        model: canonical name.
        created_ms: acceptance, Unix milliseconds.
        start_by_ms: a reply that has not started by then never will.
        end_by_ms: nobody reads on after that.
    """

    request_id: str
    model: str
    created_ms: int
    start_by_ms: int
    end_by_ms: int


def reply_facts(settings: Settings, request_id: str, accepted: Accepted) -> ReplyFacts:
    """The facts of a request, from its ``0-1`` entry.

    A reply takes at most ``streams.open_ttl_seconds`` from its latest start on. A tier that is no longer
    configured has no wait left.
    """
    tier = settings.tiers.get(accepted.tier)
    wait_ms = int(tier.max_wait_seconds * 1000) if tier is not None else 0
    start_by_ms = accepted.created_ms + wait_ms + _SLACK_MS
    return ReplyFacts(
        request_id=request_id,
        model=accepted.model,
        created_ms=accepted.created_ms,
        start_by_ms=start_by_ms,
        end_by_ms=start_by_ms + settings.streams.open_ttl_seconds * 1000,
    )
