"""What a reply has written, and how it stands to what the store of token streams still has. Pure.

A store that was restarted or replaced by its replica may have lost the end of a stream. Whoever wrote it
finds out here, writes it again, or leaves the reply to another attempt: it never goes on behind the loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from contracts.continuity import joins
from contracts.entries import Appendable, Entry, StartAfter, Started, StreamEntry, Text
from contracts.stream_ids import MAX_PART, StreamId
from contracts.token_stream import Appended

#: Entries kept for writing again: some seconds of one reply, more than a store loses that syncs each second.
KEPT = 512

Write: TypeAlias = tuple[StreamId, Appendable]


@dataclass(slots=True)
class Trail:
    """What one attempt has in its stream, as far as its writer was told.

    Attributes:
        last: id of its last entry; None before its start is known to be in.
        start: that start.
        seen: the writer's count of interruptions as of which :attr:`last` was right.
    """

    last: StreamId | None = None
    start: Started | None = None
    seen: int = 0
    _texts: deque[tuple[StreamId, Text]] = field(default_factory=lambda: deque(maxlen=KEPT))

    def wrote(self, entry_id: StreamId, entry: Appendable, seen: int) -> None:
        """The entry is in the stream."""
        self.last, self.seen = entry_id, seen
        if isinstance(entry, Text):
            self._texts.append((entry_id, entry))
        elif isinstance(entry, Started | StartAfter):
            self.start = entry if isinstance(entry, Started) else entry.started

    def lost_behind(self, kept: StreamId) -> list[tuple[StreamId, Text]] | None:
        """The texts behind ``kept``, the last entry the store still has; None if not all are known here.

        They are then as good as not written.
        """
        missing = [item for item in self._texts if item[0] > kept]
        if not missing or not joins(kept.token, StreamEntry(*missing[0])):
            return None
        for _ in missing:
            self._texts.pop()
        self.last = kept
        return missing


class Standing(Enum):
    """Where a stream's last entry is, seen from what an attempt has written."""

    #: It is the attempt's last one: what was not answered was not applied.
    SAME = "same"
    #: It is a later one of the attempt, or the start in doubt: look which.
    AHEAD = "ahead"
    #: It is an earlier one: the store has lost entries.
    BEHIND = "behind"


def standing(last: StreamId | None, trail: Trail, attempt: int) -> Standing | Appended:
    """How a stream whose last id is ``last`` stands to an attempt; a refusal where it is over."""
    if last is None:
        return Appended.GONE
    if last.is_seal:
        return Appended.SEALED
    if last.attempt > attempt:
        return Appended.FENCED
    if last.attempt < attempt:
        # With its start the attempt has lost its claim: another worker may make the same one.
        return Standing.SAME if trail.last is None else Appended.FENCED
    if trail.last is None or last > trail.last:
        return Standing.AHEAD
    return Standing.SAME if last == trail.last else Standing.BEHIND


def before_start(attempt: int) -> StreamId:
    """A position behind everything of earlier attempts."""
    return StreamId(attempt - 1, MAX_PART)


def landed(writes: Sequence[Write], found: Sequence[StreamEntry]) -> int | None:
    """How many of ``writes`` were applied, given what the stream holds behind the last one known.

    None: it holds something else: another's start, or a later write without an earlier one.
    """
    if len(found) > len(writes):
        return None
    for (entry_id, entry), item in zip(writes, found, strict=False):
        if item.id != entry_id or not _same(item.entry, entry):
            return None
    return len(found)


def _same(found: Entry, entry: Appendable) -> bool:
    if isinstance(found, Text) and isinstance(entry, Text):
        # Not the logprobs: a minus infinity among them does not come back from JSON.
        return (found.text, found.token_ids, found.index) == (entry.text, entry.token_ids, entry.index)
    return found == (entry.started if isinstance(entry, StartAfter) else entry)


def same_start(trail: Trail, attempt: int, found: Sequence[StreamEntry]) -> bool:
    """Whether the entry read from :func:`before_start` on is this attempt's own start."""
    return bool(found) and found[0].id == StreamId(attempt, 0) and found[0].entry == trail.start
