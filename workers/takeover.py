"""What a worker does with a request it is given, by the state of the request's token stream. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from contracts.records import DispatchRecord
from contracts.reply import Reply


@dataclass(frozen=True, slots=True)
class Generate:
    """Run the request as ``attempt``, going on after ``emitted`` (empty: from the start)."""

    attempt: int
    emitted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """It has reached its terminal state: publish its outcome."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """Another worker runs it; the scheduler watches that one's lease."""


@dataclass(frozen=True, slots=True)
class Expired:
    """Nobody waits for it any more, and it has not started: end it."""


@dataclass(frozen=True, slots=True)
class Lost:
    """There is no stream: it expired, or went with its Redis."""


@dataclass(frozen=True, slots=True)
class NotContinuable:
    """Text is out that no other worker can go on from: end it, the client may retry."""


Decision: TypeAlias = Generate | Finished | Foreign | Expired | Lost | NotContinuable


def decide(
    record: DispatchRecord, reply: Reply, *, lease_holder: str | None, worker_id: str, now_ms: int
) -> Decision:
    """What to do with ``record``.

    Args:
        reply: the fold of the request's whole stream; of nothing, where there is no stream.
        lease_holder: the worker whose lease on the request is alive, if any.
        worker_id: this worker, which does not run the request at this moment.
    """
    if reply.terminal is not None:
        return Finished()
    if reply.accepted is None and not reply.attempts:
        return Lost()
    if reply.attempts == 0:
        if now_ms > record.deadline_ms:
            return Expired()
        return Generate(max(1, record.attempt))
    if lease_holder is not None and lease_holder != worker_id:
        return Foreign()
    attempt = max(reply.attempts + 1, record.attempt)
    if reply.tokens_out == 0:
        return Generate(attempt)
    sampling = record.sampling
    if sampling.n > 1 or sampling.json_schema is not None or sampling.top_logprobs is not None:
        return NotContinuable()
    return Generate(attempt, tuple(reply.choices[0].token_ids))
