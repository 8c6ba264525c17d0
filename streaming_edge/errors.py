"""What can go wrong while a token stream is read. Both are told to the client, never retried here."""

from __future__ import annotations

from contracts.errors import ApiError, ErrorCode


class StreamLost(ApiError):
    """A stream that was being read is gone, or is behind what was already read from it.

    Its Redis lost it (restart without its data, eviction), or it expired under a very slow reader.

    Attributes:
        request_id: whose stream it was.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(ErrorCode.STREAM_LOST, "The reply's token stream was lost while it was read.")
        self.request_id = request_id
