"""What workers tell the schedulers of their pool: capacity and finished requests.

The feed is best effort and bounded. Every heartbeat carries the whole state, and the scheduler checks
leases and seals by itself, so a lost event costs time, never correctness.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class WorkerEvent(BaseModel):
    """One event of a worker.

    Attributes:
        worker_id: this incarnation of the worker; a restarted one has another id.
        slot: partition of the pool's dispatch topic it reads.
        sent_ms: Unix milliseconds, by the worker's clock (for people; liveness uses the time of arrival).
        max_seqs: replies it can generate at once.
        running: replies it generates now.
        kv_tokens_total / kv_tokens_free: room of its KV cache, tokens; 0 total = unknown.
        accepting: False while it drains or its engine is dead.
        finished: requests that ended here since the last event.
        handed_over: requests this worker leaves unfinished because it stops; others can take them at once.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    worker_id: str
    slot: int
    sent_ms: int
    max_seqs: int
    running: int
    kv_tokens_total: int = 0
    kv_tokens_free: int = 0
    accepting: bool = True
    finished: list[str] = Field(default_factory=list)
    handed_over: list[str] = Field(default_factory=list)
