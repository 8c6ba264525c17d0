"""What can go wrong with the KV tier; none of it ends a request."""

from __future__ import annotations


class TierError(Exception):
    """Base of this package's errors.

    Attributes:
        reason: one of a few words, fit for a metric label.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TierUnavailable(TierError):
    """Redis does not answer, in time or as it should."""


class ChunkRejected(TierError):
    """A value is there and must not be used."""
