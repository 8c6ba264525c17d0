"""A request as the policy sees it, from its line to its end."""

from __future__ import annotations

from dataclasses import dataclass

from contracts.tiers import QueueClass

from ..protocols import Job

#: Place in a line: when it was queued, then when it came here. No two requests have the same.
Place = tuple[int, int]


@dataclass(slots=True, eq=False)
class Request:
    """Waiting, then in flight, perhaps waiting again, then closing.

    Attributes:
        place: kept for its whole life, so that who comes back does not start at the end of the line.
        ends_ms: when it is ended if it is waiting then.
        attempts: the highest attempt known to be taken.
        in_line: it waits and may be served: no earlier request of its conversation is open.
        losses: how many workers it has lost.
        returned: whether a worker had it and did not end it.
        worker_id / dispatched_ms / heard_ms: where and since when it is in flight, and when it was last
            known to be alive.
        slots: worker slots it holds.
        shunned: the worker it was lost on; another one is preferred.
        generated: output tokens it is known to have, of all attempts.
        charged: whether its prompt has been charged.
        turn: the class whose turn it was served in, if not that of its own (it had waited long).
        overtaken: how many have passed it although it was next.
        blocked_ms: since when it is next and fits nowhere although there are free slots; 0 = not.
        kept: the worker that takes nothing else until it has room for this request; empty = none.
        borrowed: it was given a slot that nobody of the first class waited for, so it may have to give it
            back.
        preempting: it was told to, for whoever comes first.
        preemptions: how often it was told to.
        cleared_ms: when somebody was last looked for to make room for it at ``kept``; 0 = never.
    """

    job: Job
    place: Place
    ends_ms: int
    waiting: bool = False
    in_line: bool = False
    attempts: int = 0
    losses: int = 0
    returned: bool = False
    worker_id: str = ""
    dispatched_ms: int = 0
    heard_ms: int = 0
    slots: int = 0
    shunned: str = ""
    generated: int = 0
    charged: bool = False
    turn: QueueClass | None = None
    overtaken: int = 0
    blocked_ms: int = 0
    kept: str = ""
    borrowed: bool = False
    preempting: bool = False
    preemptions: int = 0
    cleared_ms: int = 0

    @property
    def tokens(self) -> int:
        """What it has come to so far: what another worker would have to compute again."""
        return self.job.prompt_tokens + self.generated
