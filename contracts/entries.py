"""What the entries of a token stream hold, and how they are written into Redis fields.

An entry's kind follows from its id (:mod:`contracts.stream_ids`). Text entries are the hot path: plain
fields, no JSON. All others are one JSON field ``j``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json, to_json

from .degraded import Degraded
from .errors import ErrorBody
from .records import Usage
from .stream_ids import ACCEPTED, DISPATCHED, MODERATED, StreamId
from .tiers import FinishReason, Status


class _Json(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Accepted(_Json):
    """``0-1``: who asked for what, when. Enough to close the request when its record is lost.

    Attributes:
        key_id: public id of the API key; empty in entries of older versions.
        deadline_ms: Unix milliseconds after which it is no longer started; 0 in older entries.
        traceparent: W3C trace context of the request.
        degraded: what it gets less of because of overload; ``model`` is the one that serves it.
    """

    tenant: str
    key_id: str = ""
    tier: str
    model: str
    created_ms: int
    deadline_ms: int = 0
    conversation_id: str | None = None
    traceparent: str | None = None
    choices: int = 1
    degraded: Degraded | None = None


class Moderated(_Json):
    """``0-2``: let through and tokenized."""

    prompt_tokens: int


class Dispatched(_Json):
    """``0-3``: given to a worker.

    ``prompt_tokens`` again, because ``0-2`` may come second and is then refused.
    """

    worker_id: str
    prompt_tokens: int | None = None


class Started(_Json):
    """``<a>-0``: a worker starts attempt ``a``; earlier attempts can no longer append.

    Attributes:
        tokens_out: output tokens of earlier attempts that it goes on after; None in older entries.
    """

    worker_id: str
    model_revision: str
    tokens_out: int | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """``<a>-<n>``: text that is final.

    Attributes:
        text: whole characters, never empty.
        token_ids: the tokens it consists of; the last one is output token ``n``.
        index: which choice.
        logprobs: one object per token, in the OpenAI API's ``logprobs.content`` shape, or None.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    index: int = 0
    logprobs: tuple[dict[str, Any], ...] | None = None


class Terminal(_Json):
    """``MAX-MAX``: how it ended.

    Attributes:
        finish_reasons: one per choice, in order of index; empty unless completed.
        usage: None where whoever sealed it did not run it; then it follows from the stream
            (:class:`contracts.reply.Reply`).
    """

    status: Status
    finish_reasons: list[FinishReason] = Field(default_factory=list)
    usage: Usage | None = None
    error: ErrorBody | None = None


@dataclass(frozen=True, slots=True)
class SealAfter:
    """A terminal entry to be written only if ``after`` is still the stream's last id, else it is fenced.

    How a worker seals what it ran: the seal is larger than every id, so the id rule alone would let it end
    a reply that another worker has taken over.
    """

    terminal: Terminal
    after: StreamId


@dataclass(frozen=True, slots=True)
class StartAfter:
    """The start of an attempt, to be written only if ``after`` is still the stream's last id.

    How a worker takes over: what it goes on after must still be all that is out when it fences the old one.
    """

    started: Started
    after: StreamId


Entry: TypeAlias = Accepted | Moderated | Dispatched | Started | Text | Terminal
#: What can be appended: an entry, or one under a condition.
Appendable: TypeAlias = Entry | SealAfter | StartAfter


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """An entry at its place in the stream."""

    id: StreamId
    entry: Entry = field(repr=False)


def encode_entry(entry: Entry) -> dict[str, str | bytes]:
    """Fields for XADD."""
    if not isinstance(entry, Text):
        return {"j": entry.model_dump_json(exclude_none=True)}
    fields: dict[str, str | bytes] = {"t": entry.text, "k": ",".join(map(str, entry.token_ids))}
    if entry.index:
        fields["c"] = str(entry.index)
    if entry.logprobs is not None:
        fields["p"] = to_json(entry.logprobs)
    return fields


def decode_entry(entry_id: StreamId, fields: dict[bytes, bytes]) -> Entry:
    """Inverse of :func:`encode_entry`.

    Raises:
        ValueError: the fields do not fit the id (someone else wrote into the stream).
    """
    try:
        if entry_id.token and entry_id.attempt and not entry_id.is_seal:
            ids = fields.get(b"k", b"")
            logprobs = fields.get(b"p")
            return Text(
                text=fields[b"t"].decode(),
                token_ids=tuple(map(int, ids.split(b","))) if ids else (),
                index=int(fields.get(b"c", 0)),
                logprobs=tuple(from_json(logprobs)) if logprobs is not None else None,
            )
        return _kind(entry_id).model_validate_json(fields[b"j"])
    except KeyError as error:
        raise ValueError(f"entry {entry_id} lacks a field") from error


def _kind(entry_id: StreamId) -> type[Accepted | Moderated | Dispatched | Started | Terminal]:
    if entry_id.is_seal:
        return Terminal
    if entry_id.is_attempt_start:
        return Started
    match entry_id:
        case x if x == ACCEPTED:
            return Accepted
        case x if x == MODERATED:
            return Moderated
        case x if x == DISPATCHED:
            return Dispatched
        case _:
            raise ValueError(f"no entry has the id {entry_id}")
