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
        taken: requests it has taken since the last event: those count in ``running`` and no longer in
            ``credits``.
        finished: requests that ended here since the last event.
        handed_over: requests this worker leaves unfinished because it stops or was told to make room;
            others can take them at once.
        generated: output tokens so far, over all choices: in timed heartbeats of each request it runs, and in
            every event of those that leave with it, their last count.
        prefill_tokens: prompt tokens it has taken and not yet prefilled.
        prefixes / prefixes_gone: prefix hashes (see ``kv.layout``) that it has come to hold / has dropped
            since the last event. Hints: a lost event costs a cache hit, never correctness.
        tier_prefixes / tier_prefixes_gone: prefix hashes that it has found or stored in the KV tier that the
            workers of the pool share / has looked for there in vain, since the last event. Hints, too.
        load_us_per_token / prefill_us_per_token: microseconds that it takes to load a token from that tier /
            to prefill one, as measured lately; None = not measured, or it has no tier.
        credits: free slots it grants to each scheduler, by scheduler id; empty = it knows none, and every
            scheduler may take what is free. Of its own grant a scheduler takes off what it has dispatched
            there and does not yet know as taken (see ``taken``, ``generated``) or ended.
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
    taken: list[str] = Field(default_factory=list)
    finished: list[str] = Field(default_factory=list)
    handed_over: list[str] = Field(default_factory=list)
    generated: dict[str, int] = Field(default_factory=dict)
    prefill_tokens: int = 0
    prefixes: list[str] = Field(default_factory=list)
    prefixes_gone: list[str] = Field(default_factory=list)
    tier_prefixes: list[str] = Field(default_factory=list)
    tier_prefixes_gone: list[str] = Field(default_factory=list)
    load_us_per_token: float | None = None
    prefill_us_per_token: float | None = None
    credits: dict[str, int] = Field(default_factory=dict)
