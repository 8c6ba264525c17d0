"""One reader of a token stream, without I/O: live entries, a bounded buffer, and catching up by pages.

The feed pushes every entry of the stream in order, once. A reader that keeps up gets them from its buffer.
One that does not loses the buffer, never its place: it then reads pages from the store at its own pace
until it has reached what the feed has pushed, and is live again.

The hand-over needs no lock, because pushes are contiguous: after a page that reaches ``live``, the next
push begins right behind ``live``, and what the page has already shown of it is dropped by its id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.entries import StreamEntry
from contracts.stream_ids import StreamId


@dataclass(slots=True)
class ReaderState:
    """Where a reader is.

    Attributes:
        limit: most entries held in the buffer.
        cursor: last entry handed out (or the offset the reader began after).
        live: last entry the feed has pushed.
        behind: entries between ``cursor`` and ``live`` must be read from the store.
    """

    limit: int
    cursor: StreamId
    live: StreamId
    behind: bool = False
    _buffer: list[StreamEntry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.behind = self.cursor < self.live

    @property
    def buffered(self) -> int:
        """Entries in the buffer."""
        return len(self._buffer)

    def push(self, entries: Sequence[StreamEntry]) -> bool:
        """Take the feed's next entries (not empty). Returns whether this made the buffer overflow."""
        self.live = entries[-1].id
        if self.behind:
            return False
        if entries[0].id <= self.cursor:
            entries = [e for e in entries if e.id > self.cursor]
        if len(self._buffer) + len(entries) > self.limit:
            self._buffer = []
            self.behind = True
            return True
        self._buffer += entries
        return False

    def take(self) -> list[StreamEntry]:
        """Hand out the buffer; empty when there is nothing or when the reader is behind."""
        taken = self._buffer
        if taken:
            self._buffer = []
            self.cursor = taken[-1].id
        return taken

    def page(self, entries: Sequence[StreamEntry]) -> bool:
        """Hand out a page that was read after ``cursor`` while behind.

        Returns False for a gap: the feed has pushed entries that the store no longer has.
        """
        if not entries:
            return False
        self.cursor = entries[-1].id
        self.behind = self.cursor < self.live
        return True
