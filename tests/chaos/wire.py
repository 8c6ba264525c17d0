"""What comes over a client's connection, whichever kind it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp

from contracts.stream_ids import StreamId

from .ledger import End

#: Longest silence of a connection on which something must come (keep-alives come every 2 s).
SILENCE_SECONDS = 20.0
RETRY_CODES = {"service_unavailable", "queue_full", "rate_limited", "conversation_busy"}
STATUS_OF = {"cancelled": "cancelled", "deadline_exceeded": "expired", "content_filter": "refused"}


class Cut(Exception):
    """The connection is lost, or the service says "later": connect again, with a pause."""


class Refused(Exception):
    """The service says no; asking again gives the same answer.

    Attributes:
        code: its error code.
    """

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class Accepted:
    """The service has taken the request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of a choice's text."""

    offset: StreamId
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Status:
    """Progress without text."""

    offset: StreamId | None


Event = Accepted | Text | Status | End


@dataclass(frozen=True)
class Network:
    """Where the stack is."""

    url: str
    ws_url: str
    http: aiohttp.ClientSession


def said(error: dict[str, Any]) -> Exception:
    """What to raise for an error object."""
    code = str(error.get("code"))
    return Cut(code) if code in RETRY_CODES else Refused(code)
