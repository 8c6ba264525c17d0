"""Short ways to say what a scheduling policy is told and what it answers."""

from __future__ import annotations

from contracts.tiers import QueueClass
from contracts.worker_events import WorkerEvent
from infra.settings import SchedulerSettings
from stages.protocols import Dispatch, Effect, Job, SchedulingPolicy

LEASE = 1_000
AGEING = 10
NOW = 1_000_000


def scheduler_settings(**chosen: object) -> SchedulerSettings:
    """Settings with times that are easy to reckon with; slots are not reserved unless asked for."""
    defaults = {
        "ageing_seconds": AGEING,
        "worker_timeout_ms": 2_000,
        "max_attempts": 3,
        "reserved_slots": {},
    }
    return SchedulerSettings.model_validate({**defaults, **chosen})


def job(
    name: str,
    queue_class: QueueClass = QueueClass.INTERACTIVE,
    *,
    tenant: str = "t",
    queued: int = NOW,
    wait: int = 60_000,
    n: int = 1,
    prompt: int = 10,
    output: int = 10,
    pool: str = "p",
    prefix: tuple[str, ...] = (),
    conversation: str | None = None,
) -> Job:
    """A job of one choice and few tokens, queued now."""
    return Job(
        request_id=name,
        queue_class=queue_class,
        pool=pool,
        tenant=tenant,
        choices=n,
        prompt_tokens=prompt,
        queued_ms=queued,
        deadline_ms=queued + wait,
        output_tokens=output,
        prefix_hashes=prefix,
        conversation_id=conversation,
    )


def worker(
    policy: SchedulingPolicy,
    name: str,
    slot: int = 0,
    *,
    seqs: int = 1,
    running: int = 0,
    now: int = NOW,
    pool: str = "p",
    **more: object,
) -> None:
    """A worker's event arrives; ``more`` are further fields of it."""
    event = WorkerEvent.model_validate(
        {
            "worker_id": name,
            "slot": slot,
            "sent_ms": 0,
            "max_seqs": seqs,
            "running": running,
            **more,
        }
    )
    policy.worker_seen(pool, event, now)


def dispatched(effects: list[Effect]) -> list[str]:
    """Who was given to a worker, in order."""
    return [e.request_id for e in effects if isinstance(e, Dispatch)]


def placed(effects: list[Effect]) -> dict[str, str]:
    """The worker of each that was given to one."""
    return {e.request_id: e.worker_id for e in effects if isinstance(e, Dispatch)}


def serve_all(policy: SchedulingPolicy, now: int = NOW) -> list[str]:
    """The order in which the workers serve everything that waits, each request ending at once."""
    order: list[str] = []
    while names := dispatched(policy.decide(now)):
        order += names
        for name in names:
            policy.ended(name)
    return order
