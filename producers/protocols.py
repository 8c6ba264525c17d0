"""The seams of the chat routes: behind them is the pipeline, or a recording (:mod:`infra.replay.player`)."""

from __future__ import annotations

from typing import Protocol

from contracts.entries import Terminal
from contracts.identity import Principal
from contracts.limits import Admission
from contracts.stored_reply import StoredReply
from contracts.token_stream import Appended
from streaming_edge.protocols import Intake

from .chat_request import ChatRequest
from .idempotency import Once


class ChatIntake(Intake, Protocol):
    """An intake for bodies that are validated already, too."""

    async def submit(
        self,
        principal: Principal,
        request: ChatRequest,
        *,
        traceparent: str | None = None,
        once: Once | None = None,
    ) -> Admission:
        """:meth:`Intake.accept` without the validation; the same guarantees."""


class Seals(Protocol):
    """Ends requests; see :class:`contracts.token_stream.TokenStreams`."""

    async def seal(self, request_id: str, terminal: Terminal) -> Appended:
        """Write the terminal entry; OK means this call ended the request."""


class KeptReplies(Protocol):
    """Replies that asked to be kept."""

    async def get(self, tenant: str, request_id: str) -> StoredReply | None:
        """A tenant's kept reply; None where there is none."""
