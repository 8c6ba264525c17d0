"""Tiers of users and the queue classes their requests wait in."""

from __future__ import annotations

from enum import StrEnum


class QueueClass(StrEnum):
    """The three waiting lines, highest priority first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"

    @property
    def rank(self) -> int:
        """0 is served first."""
        return list(QueueClass).index(self)


class Status(StrEnum):
    """Terminal states of a request; exactly one is reached."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    EXPIRED = "expired"


class FinishReason(StrEnum):
    """Why a choice ended, in the OpenAI API's words."""

    STOP = "stop"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"
