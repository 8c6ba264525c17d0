"""Token streams with their times, as JSON lines: what is recorded, and what is played. Pure.

A recording is one JSON object::

    {"request_id", "timing", "entries": [{"at_ms", "id", "event"}, {"at_ms", "id", "text", "token_ids"}]}

``at_ms`` counts from acceptance. Text may have an ``index`` and ``logprobs``; every other entry is an
``event``, whose kind follows from its id (:mod:`contracts.entries`). ``timing`` is ``measured``, or ``even``
where nobody was there to measure: then the text is spread evenly from the first token to the end.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, TypeVar

from pydantic_core import to_json

from contracts.continuity import joins, tokens_after
from contracts.entries import (
    Accepted,
    Entry,
    Moderated,
    Started,
    StreamEntry,
    Terminal,
    Text,
    decode_entry,
)
from contracts.errors import ErrorCode, error_body
from contracts.identity import conversation_key, is_request_id, make_request_id
from contracts.records import Usage
from contracts.stream_ids import ACCEPTED, MODERATED, SEAL, START, StreamId
from contracts.tiers import FinishReason, Status

from .sources import RecordedConversation, RecordedTurn, json_values, recorded_conversation
from .turns import masked

Timing = Literal["measured", "even"]
E = TypeVar("E", bound=StrEnum)

#: Between two pieces of a text of which no times are known.
_STEP_MS: Final = 20
#: Words with the space before them; long ones, and text without spaces, in parts.
_PIECE: Final = re.compile(r"\s*\S{1,8}|\s+\Z")
_UNKNOWN: Final = Accepted(tenant="", tier="", model="", created_ms=0)
_LOST: Final = Terminal(
    status=Status.FAILED,
    error=error_body(ErrorCode.STREAM_LOST, "The recording of this reply is not complete."),
)


class TimedEntry(NamedTuple):
    """An entry, and when it was out: milliseconds after acceptance."""

    at_ms: int
    item: StreamEntry


@dataclass(frozen=True)
class Recording:
    """A token stream with its times, as it was recorded."""

    request_id: str
    timing: Timing
    entries: tuple[TimedEntry, ...]

    @property
    def model(self) -> str:
        """The model that ran it; empty where that is not known."""
        return next((i.entry.model for _, i in self.entries if isinstance(i.entry, Accepted)), "")


@dataclass
class Recordings:
    """What was found in a file.

    Attributes:
        unreadable: entries that are neither a recording nor a conversation, a cut-off last line included.
        incomplete: recordings of which a part is missing; they end as failed there.
    """

    found: list[Recording] = field(default_factory=list)
    unreadable: int = 0
    incomplete: int = 0


def read_recordings(lines: Iterable[str]) -> Recordings:
    """What can be played of JSON lines or one JSON array: recordings, and every reply of conversations."""
    read = Recordings()
    names: set[str] = set()
    for number, raw in enumerate(json_values(lines), 1):
        recordings = list(_recordings(raw, f"conversation {number}"))
        read.unreadable += not recordings
        for recording in recordings:
            if recording.request_id in names:
                continue
            names.add(recording.request_id)
            entries = mended(recording.entries)
            read.incomplete += entries[-1].item.entry is _LOST
            read.found.append(replace(recording, entries=entries))
    return read


def mended(entries: Iterable[TimedEntry]) -> tuple[TimedEntry, ...]:
    """A stream that can be played: each entry once and in order, up to the first loss, and with an end.

    What has a hole or was cut off ends there as failed, as a stream does that lost its data.
    """
    kept: list[TimedEntry] = []
    last, at_ms = START, 0
    tokens_out: int | None = 0
    for given_ms, item in entries:
        if item.id <= last:
            continue
        if not joins(tokens_out, item):
            break
        tokens_out = tokens_after(tokens_out, item)
        last, at_ms = item.id, max(at_ms, given_ms)
        kept.append(TimedEntry(at_ms, item))
    if not kept or kept[0].item.id != ACCEPTED:
        kept.insert(0, TimedEntry(0, StreamEntry(ACCEPTED, _UNKNOWN)))
    if not last.is_seal:
        kept.append(TimedEntry(at_ms, StreamEntry(SEAL, _LOST)))
    return tuple(kept)


def even(
    items: Sequence[StreamEntry], ttft_ms: int | None, duration_ms: int | None
) -> tuple[TimedEntry, ...]:
    """Entries whose times nobody measured: the text evenly from the first token to the end of the request.

    Args:
        ttft_ms / duration_ms: after acceptance. Where they are not known, the text begins at once, and a
            piece comes every 20 ms.
    """
    texts = sum(isinstance(item.entry, Text) for item in items)
    first = ttft_ms or 0
    end = max(first, duration_ms) if duration_ms is not None else first + _STEP_MS * texts
    timed, at_ms, number = [], 0, 0
    for item in items:
        if isinstance(item.entry, Text):
            at_ms = first + (end - first) * number // texts
            number += 1
        timed.append(TimedEntry(end if item.id.is_seal else at_ms, item))
    return tuple(timed)


def spoken(turn: RecordedTurn) -> list[StreamEntry]:
    """A token stream that says what a turn's first reply says, word by word."""
    accepted = Accepted(tenant="", tier="", model=turn.model or "", created_ms=turn.at_ms)
    items = [StreamEntry(ACCEPTED, accepted)]
    if turn.reply or turn.status == Status.COMPLETED:
        items += (
            StreamEntry(MODERATED, Moderated(prompt_tokens=turn.prompt_tokens or 0)),
            StreamEntry(StreamId(1, 0), Started(worker_id="", model_revision="", tokens_out=0)),
        )
    text = (turn.reply or "").encode(errors="replace").decode()
    pieces = enumerate(_PIECE.findall(text), 1)
    items += (StreamEntry(StreamId(1, number), Text(piece)) for number, piece in pieces)
    return [*items, StreamEntry(SEAL, _end_of(turn))]


def redacted(recording: Recording) -> Recording:
    """A recording of the same shape without its words: see :func:`infra.replay.turns.conversation_object`."""
    return replace(
        recording,
        entries=tuple(
            TimedEntry(at_ms, StreamEntry(item.id, _redacted(item.entry)))
            for at_ms, item in recording.entries
        ),
    )


def recording_object(recording: Recording) -> dict[str, Any]:
    """A recording as JSON."""
    return {
        "request_id": recording.request_id,
        "timing": recording.timing,
        "entries": [
            {"at_ms": at_ms, "id": str(item.id), **_fields(item.entry)}
            for at_ms, item in recording.entries
        ],
    }


def turn_recording(turn: RecordedTurn, request_id: str, kept: Sequence[StreamEntry] = ()) -> Recording:
    """The recording of a turn from its token stream, where that is still ``kept``, or from its text."""
    return Recording(request_id, "even", even(kept or spoken(turn), turn.ttft_ms, turn.duration_ms))


def _recordings(raw: object, name: str) -> Iterator[Recording]:
    if isinstance(raw, dict) and isinstance(raw.get("entries"), list):
        if is_request_id(raw.get("request_id")):
            timing: Timing = "even" if raw.get("timing") == "even" else "measured"
            yield Recording(raw["request_id"], timing, tuple(_entries(raw["entries"])))
        return
    conversation = recorded_conversation(raw, name)
    if conversation is not None:
        for number, turn in enumerate(conversation.turns):
            if turn.reply is None and turn.status == Status.COMPLETED:
                continue  # a question at the end of a chat log
            yield turn_recording(turn, _request_id(conversation, number, turn))


def _request_id(conversation: RecordedConversation, number: int, turn: RecordedTurn) -> str:
    """The request's own id, or where the log has none, one that is always the same."""
    if turn.request_id is not None and is_request_id(turn.request_id):
        return turn.request_id
    digest = hashlib.sha256(f"{conversation.id}/{number}".encode(errors="replace")).digest()
    return make_request_id(turn.at_ms, digest[:10])


def _entries(raw: Sequence[object]) -> Iterator[TimedEntry]:
    """The entries that can be read; what is missing then shows as a hole."""
    for one in raw:
        try:
            at_ms, entry_id, entry = _entry(one)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue
        yield TimedEntry(at_ms, StreamEntry(entry_id, entry))


def _entry(raw: Any) -> tuple[int, StreamId, Entry]:
    entry_id = StreamId.parse(raw["id"])
    fields = {b"j": to_json(raw["event"])} if "event" in raw else _text_fields(raw)
    return max(0, int(raw["at_ms"])), entry_id, decode_entry(entry_id, fields)


def _text_fields(raw: dict[str, Any]) -> dict[bytes, bytes]:
    fields = {
        b"t": raw["text"].encode(),
        b"k": ",".join(str(int(token)) for token in raw.get("token_ids", ())).encode(),
        b"c": str(int(raw.get("index", 0))).encode(),
    }
    if raw.get("logprobs") is not None:
        fields[b"p"] = to_json(raw["logprobs"])
    return fields


def _fields(entry: Entry) -> dict[str, Any]:
    if not isinstance(entry, Text):
        return {"event": entry.model_dump(mode="json", exclude_none=True)}
    fields: dict[str, Any] = {"text": entry.text}
    if entry.token_ids:
        fields["token_ids"] = list(entry.token_ids)
    if entry.index:
        fields["index"] = entry.index
    if entry.logprobs is not None:
        fields["logprobs"] = list(entry.logprobs)
    return fields


def _redacted(entry: Entry) -> Entry:
    if isinstance(entry, Text):
        return Text(masked(entry.text), index=entry.index)
    if not isinstance(entry, Accepted):
        return entry
    named = entry.conversation_id
    hidden = {
        "tenant": conversation_key("", entry.tenant),
        "conversation_id": conversation_key(entry.tenant, named) if named is not None else None,
        "key_id": "",
        "traceparent": None,
    }
    return entry.model_copy(update=hidden)


def _end_of(turn: RecordedTurn) -> Terminal:
    status = Status(turn.status)
    usage = None
    if turn.output_tokens is not None:
        usage = Usage(prompt_tokens=turn.prompt_tokens or 0, completion_tokens=turn.output_tokens)
    if status is Status.COMPLETED:
        reason = _member(FinishReason, turn.finish_reason) or FinishReason.STOP
        return Terminal(status=status, finish_reasons=[reason], usage=usage)
    code = _member(ErrorCode, turn.error_code)
    error = error_body(code, "So it ended when it was recorded.") if code is not None else None
    return Terminal(status=status, usage=usage, error=error)


def _member(kind: type[E], value: str | None) -> E | None:
    return kind(value) if value in list(kind) and value is not None else None
