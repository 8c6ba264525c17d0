"""Checking the offset a client wants to resume after, before anything is read or sent (E5)."""

from __future__ import annotations

from contracts.entries import Text
from contracts.errors import ApiError, ErrorCode
from contracts.stream_ids import START, StreamId

from .protocols import StreamStore

_PAGE = 500


def parse_offset(text: str) -> StreamId:
    """The position ``text`` names in some stream.

    Raises:
        ApiError: ``invalid_offset``.
    """
    try:
        return StreamId.parse(text)
    except ValueError:
        raise ApiError(
            ErrorCode.INVALID_OFFSET, "An offset looks like 1-42 (0-0 is the beginning).", param="after"
        ) from None


async def check_offset(streams: StreamStore, request_id: str, text: str) -> StreamId:
    """The position ``text`` names in this stream; ``0-0`` is its beginning.

    Raises:
        ApiError: ``invalid_offset`` for anything that is no entry of this stream, ``offset_ahead`` for a
            position after its last entry, ``stream_expired`` when there is no stream.
        contracts.token_stream.StreamsUnavailable: Redis cannot be reached.
    """
    offset = parse_offset(text)
    if offset == START:
        return offset
    (last,) = await streams.last_ids([request_id])
    if last is None:
        raise ApiError(ErrorCode.STREAM_EXPIRED, "The reply's token stream has expired.")
    if offset > last:
        raise ApiError(
            ErrorCode.OFFSET_AHEAD, "The offset is ahead of the reply's token stream.", param="after"
        )
    if offset != last and not await streams.has_entry(request_id, offset):
        raise ApiError(
            ErrorCode.INVALID_OFFSET,
            "The offset is no entry of this reply's token stream.",
            param="after",
        )
    return offset


async def begun_choices(streams: StreamStore, request_id: str, after: StreamId) -> frozenset[int]:
    """The choices that have text at or before ``after``; reads that part of the stream."""
    begun: set[int] = set()
    at = START
    while at < after:
        page = await streams.read(request_id, at, _PAGE)
        begun.update(e.entry.index for e in page if e.id <= after and isinstance(e.entry, Text))
        if len(page) < _PAGE:
            break
        at = page[-1].id
    return frozenset(begun)
