"""The seam to the token streams: what a writer and a reader may rely on.

Guarantees (kept by Redis's own id rule, see :mod:`contracts.stream_ids`):

* one total order per request, no order between requests;
* an append is idempotent by its id: the same or a smaller id is refused, never applied twice;
* after the seal nothing is appended;
* a call that is cancelled may or may not have been applied: repeat it, the id decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from .entries import Accepted, Appendable, StreamEntry, Terminal
from .stream_ids import StreamId


class Appended(Enum):
    """What became of an append. A caller must handle all four."""

    OK = "ok"
    #: A later entry exists: someone else has taken over, or the step was done before.
    FENCED = "fenced"
    #: The request has reached its terminal state.
    SEALED = "sealed"
    #: There is no such stream (expired, or lost with its Redis).
    GONE = "gone"


class TokenStreams(Protocol):
    """Writing and reading token streams.

    Every method raises :class:`contracts.token_stream.StreamsUnavailable` when the store cannot be
    reached within its deadline, and :class:`contracts.token_stream.StreamsFull` when it takes no more.
    Seals are taken even then.
    """

    async def create(self, request_id: str, accepted: Accepted) -> None:
        """Start a stream with its ``0-1`` entry, its owner and its time to live, atomically."""

    async def append(self, writes: Sequence[tuple[str, StreamId, Appendable]]) -> list[Appended]:
        """Append ``(request id, entry id, entry)`` items in order, in one round trip.

        A seal among them starts its stream's retention time. When it raises, any of them may have been
        applied, also a later one of a request without an earlier one.
        """

    async def seal(self, request_id: str, terminal: Terminal) -> Appended:
        """Write the terminal entry; OK means this call ended the request. Starts the retention time."""

    async def read(self, request_id: str, after: StreamId, limit: int) -> list[StreamEntry]:
        """Up to ``limit`` entries after ``after``, in order; empty when there are none (yet)."""

    async def last_ids(self, request_ids: Sequence[str]) -> list[StreamId | None]:
        """Id of each stream's last entry; None where there is no stream."""


class StreamsUnavailable(Exception):
    """The store of token streams cannot be reached; retry later."""


class StreamsFull(StreamsUnavailable):
    """The store of token streams has no memory left for more; reads and seals still work."""
