"""The clock of the gateway, and the times a request's reader goes by."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from contracts.degraded import Degraded
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
    """What a reader of a reply knows before it reads; its ``0-1`` entry has the last word.

    Attributes:
        model: canonical name of the model that serves it.
        created_ms: acceptance, Unix milliseconds.
        start_by_ms: a reply that has not started by then never will.
        end_by_ms: nobody reads on after that.
        degraded: what it got less of because of overload.
    """

    request_id: str
    model: str
    created_ms: int
    start_by_ms: int
    end_by_ms: int
    degraded: Degraded | None = None

    def as_accepted(self, accepted: Accepted) -> ReplyFacts:
        """The facts of a request that was accepted otherwise than its call went by: under overload, or by an
        earlier call with the same idempotency key.
        """
        later_ms = accepted.deadline_ms + _SLACK_MS - self.start_by_ms if accepted.deadline_ms else 0
        return replace(
            self,
            model=accepted.model,
            degraded=accepted.degraded,
            start_by_ms=self.start_by_ms + later_ms,
            end_by_ms=self.end_by_ms + later_ms,
        )


def deadline_ms(settings: Settings, accepted: Accepted) -> int:
    """Until when a request is started, Unix milliseconds: what was promised when it was accepted.

    For an entry that does not say, what its tier may wait now; a tier that is no longer configured has no
    wait left.
    """
    if accepted.deadline_ms:
        return accepted.deadline_ms
    tier = settings.tiers.get(accepted.tier)
    return accepted.created_ms + (int(tier.max_wait_seconds * 1000) if tier is not None else 0)


def reply_facts(settings: Settings, request_id: str, accepted: Accepted) -> ReplyFacts:
    """The facts of a request, from its ``0-1`` entry.

    A reply takes at most ``streams.open_ttl_seconds`` from its latest start on.
    """
    start_by_ms = deadline_ms(settings, accepted) + _SLACK_MS
    return ReplyFacts(
        request_id=request_id,
        model=accepted.model,
        created_ms=accepted.created_ms,
        start_by_ms=start_by_ms,
        end_by_ms=start_by_ms + settings.streams.open_ttl_seconds * 1000,
        degraded=accepted.degraded,
    )
