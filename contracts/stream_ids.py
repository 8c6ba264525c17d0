"""Ids of the fenced token stream: the protocol of DESIGN.md section 2, without I/O.

An id is a pair of unsigned 64-bit numbers, written ``<a>-<n>``. Redis refuses an append whose id is not
larger than the last one, so writing the right id is all the locking there is.

====================  =====================================================================
``0-1`` ``0-2`` ``0-3``  accepted, moderated, dispatched
``<a>-0``             attempt ``a`` starts (``a`` >= 1) and fences every earlier attempt
``<a>-<n>``           text up to output token ``n`` of the whole reply
``MAX-MAX``           the seal: one terminal entry, after which nothing can be appended
====================  =====================================================================
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_PART = 2**64 - 1
OFFSET_PATTERN = r"(0|[1-9][0-9]{0,19})-(0|[1-9][0-9]{0,19})"
_OFFSET = re.compile(OFFSET_PATTERN, re.ASCII)


class StreamId(NamedTuple):
    """A position in a token stream; compares in stream order."""

    attempt: int
    token: int

    def __str__(self) -> str:
        return f"{self.attempt}-{self.token}"

    @classmethod
    def parse(cls, text: str) -> StreamId:
        """Read ``<a>-<n>`` as Redis writes it.

        Raises:
            ValueError: anything else (signs, one half only, leading zeros, parts over 2**64 - 1).
        """
        match = _OFFSET.fullmatch(text) if len(text) <= 41 else None
        if match is None:
            raise ValueError("a stream offset looks like 1-42")
        attempt, token = int(match[1]), int(match[2])
        if attempt > MAX_PART or token > MAX_PART:
            raise ValueError("a stream offset's parts are below 2**64")
        return cls(attempt, token)

    @property
    def is_seal(self) -> bool:
        """Whether this is the terminal id."""
        return self == SEAL

    @property
    def is_attempt_start(self) -> bool:
        """Whether this is ``<a>-0``, the fence of attempt ``a``."""
        return self.attempt > 0 and self.token == 0 and not self.is_seal


START = StreamId(0, 0)
ACCEPTED = StreamId(0, 1)
MODERATED = StreamId(0, 2)
DISPATCHED = StreamId(0, 3)
SEAL = StreamId(MAX_PART, MAX_PART)
