"""Who is served next, and where: the life of requests, their order, and their placement."""

from __future__ import annotations

from typing import Literal

from infra.settings import SchedulerSettings

from ..protocols import SchedulingPolicy
from .fair import FairOrder
from .life import Policy
from .order import FirstComeFirstServed, StrictPriority
from .placement import ExpectedTtft, LeastLoaded

PolicyName = Literal["fair", "strict", "fcfs"]


def make_policy(
    name: PolicyName,
    settings: SchedulerSettings,
    lease_ms: int,
    scheduler_id: str = "",
) -> SchedulingPolicy:
    """Make a policy that knows of nothing yet.

    Args:
        name: ``fair`` is the default of the settings; the others are baselines to compare it with.
        lease_ms: how long a worker's lease of a request lasts.
        scheduler_id: whose grants of slots (``WorkerEvent.credits``) are ours.
    """
    match name:
        case "fair":
            return Policy(settings, lease_ms, scheduler_id, ExpectedTtft(settings), FairOrder)
        case "strict":
            return Policy(settings, lease_ms, scheduler_id, LeastLoaded(), StrictPriority)
        case "fcfs":
            return Policy(settings, lease_ms, scheduler_id, LeastLoaded(), FirstComeFirstServed)
