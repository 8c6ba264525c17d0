"""Decisions of the supervisor, without clock or I/O: restart or give up, in what order, who is ready."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..role import EXIT_CONFIGURATION

FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 5.0
#: A process that ran for so long was no start-up failure: its next restart is a first one again.
SETTLED_SECONDS = 10.0

#: Name of the Redis of the KV tier among a stack's processes.
CACHE = "kv-redis"

#: What drains together, in order: nothing new comes in, what runs gets out, then what both stand on.
#: The seconds are the time of a phase; what is left then is killed. They add up to less than 15.
DRAIN_PHASES: tuple[tuple[frozenset[str], float], ...] = (
    (frozenset({"gateway", "edge", "batch-runner"}), 4.0),
    (frozenset({"moderation", "scheduler", "history"}), 4.0),
    (frozenset({"worker"}), 4.0),
    (frozenset({"redis", CACHE}), 1.5),
    (frozenset({"broker"}), 1.0),
)

#: Time all roles together get to finish what runs when their stack stops. A role whose own grace time is
#: longer is then told a second time, which ends it.
STACK_DRAIN_SECONDS = 3.0
#: What each phase gets of it at least.
SHORTEST_DRAIN_SECONDS = 0.5
#: A process that drains longer than its grace time and this is killed.
STUCK_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the process again, at once or after a pause; ``streak`` counts quick deaths in a row."""

    after_seconds: float
    streak: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Starting again would not help."""


def after_exit(code: int, ran_seconds: float, streak: int) -> Restart | GiveUp:
    """What to do about a process that ended although its stack goes on.

    One that ended with 0 was asked to by somebody and has drained: that is a restart, not a death.

    Args:
        code: its exit code; negative for a signal.
        ran_seconds: how long it ran.
        streak: the ``streak`` of its last restart, 0 at first.
    """
    if code == EXIT_CONFIGURATION:
        return GiveUp()
    if code == 0 and ran_seconds >= FIRST_WAIT_SECONDS:
        return Restart(0.0, 0)
    deaths = 1 if ran_seconds >= SETTLED_SECONDS else streak + 1
    wait: float = FIRST_WAIT_SECONDS * 2 ** min(deaths - 1, 16)
    return Restart(min(wait, LONGEST_WAIT_SECONDS), deaths)


def drain_phases(names: Iterable[str]) -> list[tuple[list[str], float]]:
    """Names in the order they drain, with the grace of each phase in seconds; empty phases are left out."""
    present = list(dict.fromkeys(names))
    phases = [([n for n in present if n in group], grace) for group, grace in DRAIN_PHASES]
    return [(members, grace) for members, grace in phases if members]


@dataclass(frozen=True, slots=True)
class RoleHealth:
    """A process of the stack, as its readiness goes."""

    name: str
    index: int
    ready: bool
    reason: str | None
    pool: str | None = None


def pipeline_gap(roles: Sequence[RoleHealth]) -> str | None:
    """Why a request put in now could not be answered by the other roles of this stack, or None.

    The gateway asks this about the others. History and the batch runner are not on the way of a reply, and
    one worker of each pool is enough.
    """
    for name in ("moderation", "scheduler", "edge"):
        if not any(r.ready for r in roles if r.name == name):
            return f"{name} is not ready"
    workers = [r for r in roles if r.name == "worker"]
    for pool in dict.fromkeys(r.pool for r in workers) or (None,):
        members = [r for r in workers if r.pool == pool]
        if not any(r.ready for r in members):
            reason = next((r.reason for r in members if r.reason), None)
            where = f" of pool {pool}" if pool else ""
            return f"no worker{where} is ready" + (f" ({reason})" if reason else "")
    return None
