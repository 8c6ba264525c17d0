"""What a worker does with a request it is given, by the state of the request's token stream. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from contracts.records import DispatchRecord
from contracts.reply import Reply
from contracts.tiers import FinishReason


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


@dataclass(frozen=True, slots=True)
class Broken:
    """A part of the stream was lost: nothing true can be made of the rest, end it."""


Decision: TypeAlias = Generate | Finished | Foreign | Expired | Lost | NotContinuable | Broken


def decide(
    record: DispatchRecord,
    reply: Reply,
    *,
    lease_holder: str | None,
    worker_id: str,
    continues: bool,
    now_ms: int,
) -> Decision:
    """What to do with ``record``.

    Args:
        reply: the fold of the request's whole stream; of nothing, where there is no stream.
        lease_holder: the worker whose lease on the request is alive, if any.
        worker_id: this worker, which does not run the request at this moment.
        continues: whether this worker's engine can go on with such a reply (``Engine.continues``).
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
    if reply.gap is not None:
        return Broken()
    attempt = max(reply.attempts + 1, record.attempt)
    if reply.tokens_out == 0:
        return Generate(attempt)
    # Of several choices the stream does not say which have ended, so one could go on after its end.
    if record.sampling.n > 1 or not continues:
        return NotContinuable()
    return Generate(attempt, tuple(reply.choices[0].token_ids))


def ended_as(emitted: int, tokens_text: str, text: str, budget: int | None) -> FinishReason | None:
    """Why a choice had ended when its worker was lost between its last text and the seal.

    None: it had not, or nothing shows it (its end of sequence is not out); then the engine finds its end
    again.

    Args:
        emitted: tokens that are out.
        tokens_text: their text, an incomplete character at the end left away.
        text: the text that is out.
    """
    if len(text) < len(tokens_text):  # a stop string cut the last token's text
        return FinishReason.STOP
    if budget is not None and emitted >= budget:
        return FinishReason.LENGTH
    # What a token holds besides half a character comes out without the other half only at the end.
    return FinishReason.STOP if len(text) > len(tokens_text) else None
