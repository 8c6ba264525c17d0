"""Whether the entries of a token stream join: no token between two of them is missing or there twice.

Redis keeps entries in order, but one that comes back without its last appends (an append-only file that was
synced a second ago, a replica that was behind when it was promoted) lets a writer go on behind the loss. The
ids tell: ``n`` of ``<a>-<n>`` is the running count of output tokens, and a text entry carries its tokens.
"""

from __future__ import annotations

from .entries import Started, StreamEntry, Text
from .stream_ids import MAX_PART, StreamId


def tokens_at(offset: StreamId) -> int | None:
    """Output tokens at or before an offset; None where its id does not say (a later start, the seal)."""
    if offset.attempt == 0 or offset == (1, 0):
        return 0
    return None if offset.is_attempt_start or offset.attempt == MAX_PART else offset.token


def tokens_after(tokens_out: int | None, item: StreamEntry) -> int | None:
    """Output tokens at or before ``item``, if ``tokens_out`` were before it (None = not known)."""
    if isinstance(item.entry, Text):
        return item.id.token
    if isinstance(item.entry, Started) and tokens_out is None:
        return item.entry.tokens_out
    return tokens_out


def joins(tokens_out: int | None, item: StreamEntry) -> bool:
    """Whether ``item`` goes on right after ``tokens_out`` output tokens.

    What cannot be checked joins: after an unknown count, text of writers that name no tokens, starts of
    writers that do not say what they go on after.
    """
    if tokens_out is None:
        return True
    entry = item.entry
    if isinstance(entry, Text):
        count = len(entry.token_ids)
        return item.id.token - count == tokens_out if count else item.id.token > tokens_out
    if isinstance(entry, Started):
        return entry.tokens_out is None or entry.tokens_out == tokens_out
    return True
