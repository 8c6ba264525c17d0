"""What becomes of an open request that no scheduler has in hand. Pure.

A request gets here when nobody has touched it for ``orphan_ms``: its record is before moderation or beyond
the scheduler's window, or its broker has forgotten it, or its schedulers are gone. So no accepted request
stays open for ever:

* not started: ended as expired at its deadline, or at once as unavailable where its record is known to be
  lost (it was accepted before the topics were last made);
* started, with a live lease: its worker ends it;
* started, without one: failed, as the worker is lost and nobody is left to find another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from contracts.entries import Accepted, Terminal
from contracts.errors import ErrorCode, error_body
from contracts.stream_ids import StreamId
from contracts.tiers import Status

#: From acceptance, where the entry does not name its deadline.
_UNKNOWN_WAIT_MS = 3_600_000
#: Whose business it is gets this much time first: the stages end what waited too long.
DEADLINE_MARGIN_MS = 5_000

EXPIRED = Terminal(
    status=Status.EXPIRED,
    error=error_body(ErrorCode.DEADLINE_EXCEEDED, "The request was not started in time."),
)
RECORD_LOST = Terminal(
    status=Status.FAILED,
    error=error_body(
        ErrorCode.REQUEST_LOST, "The request was lost before it was started; send it again."
    ),
)
ORPHANED = Terminal(
    status=Status.FAILED,
    error=error_body(ErrorCode.WORKER_LOST, "The worker was lost and no other was found."),
)

_OURS = (EXPIRED, RECORD_LOST, ORPHANED)


def ended_by_reaper(terminal: Terminal | None) -> bool:
    """Whether a reaper wrote this seal, so that reapers owe its outcome."""
    return terminal in _OURS


@dataclass(frozen=True, slots=True)
class Found:
    """An untouched request as its stream shows it.

    Attributes:
        last: id of the stream's last entry; None = there is no stream.
        leased: whether a worker holds its lease.
        accepted: its ``0-1`` entry, where that can be read.
    """

    last: StreamId | None
    leased: bool
    accepted: Accepted | None


@dataclass(frozen=True, slots=True)
class Forget:
    """Take it out of the index: it is sealed, or (``lost``) its stream is gone."""

    lost: bool


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Leave it alone; it is due again ``orphan_ms`` after ``from_ms``."""

    from_ms: int


@dataclass(frozen=True, slots=True)
class End:
    """Seal it, and publish its outcome."""

    terminal: Terminal


Verdict: TypeAlias = Forget | LookAgain | End


def judge(found: Found, *, now_ms: int, born_ms: int, orphan_ms: int) -> Verdict:
    """What to do with a request nobody has touched for ``orphan_ms``.

    Args:
        now_ms: Unix milliseconds.
        born_ms: when the request topics were last created; 0 = not known.
    """
    if found.last is None:
        return Forget(lost=True)
    if found.last.is_seal:
        return Forget(lost=False)
    if found.leased:
        return LookAgain(now_ms)
    if found.last.attempt:
        return End(ORPHANED)
    if found.accepted is None:  # an entry that is no 0-1 in its place: nobody can ever run this
        return End(ORPHANED)
    if found.accepted.created_ms < born_ms and now_ms - born_ms >= orphan_ms:
        return End(RECORD_LOST)
    deadline_ms = found.accepted.deadline_ms or found.accepted.created_ms + _UNKNOWN_WAIT_MS
    ends_ms = deadline_ms + DEADLINE_MARGIN_MS
    if now_ms >= ends_ms:
        return End(EXPIRED)
    # It may wait to its deadline; a look on the way finds the topics made anew meanwhile.
    return LookAgain(min(now_ms, ends_ms - orphan_ms))
