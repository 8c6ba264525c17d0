"""The seams of the edge: who may come in, and how a request is put into the pipeline.

The edge owns them and never sees what is behind: ``producers`` implements both.
"""

from __future__ import annotations

from typing import Protocol

from contracts.entries import StreamEntry
from contracts.identity import Principal
from contracts.limits import Admission


class Door(Protocol):
    """Knows the API keys."""

    def authenticate(self, api_key: str) -> Principal:
        """Who this key stands for.

        Raises:
            contracts.errors.ApiError: ``invalid_api_key``. Takes the same time for every wrong key.
        """


class Intake(Protocol):
    """Puts requests into the pipeline, and ends them."""

    async def accept(
        self,
        principal: Principal,
        body: object,
        *,
        traceparent: str | None = None,
        idempotency_key: str | None = None,
    ) -> Admission:
        """Validate a chat completion body and accept it.

        With a key, a call that repeats an earlier one returns that one's request.

        When it returns, the token stream exists (``0-1``) and Kafka has acknowledged the request: from
        then on it reaches exactly one terminal state. Cancelling the call may leave an accepted request
        behind, which then ends by itself.

        Raises:
            contracts.errors.ApiError: the request was not accepted, and nothing of it remains.
        """

    async def cancel(self, principal: Principal, request_id: str) -> None:
        """End a request as cancelled, wherever it is. Idempotent; a sealed request stays as it is.

        Raises:
            contracts.errors.ApiError: ``not_found`` for unknown and foreign requests alike.
        """

    async def authorize(self, principal: Principal, request_id: str) -> None:
        """Check that ``principal`` may read a request's stream.

        Raises:
            contracts.errors.ApiError: ``not_found`` for malformed, unknown and foreign ids alike;
                ``stream_expired`` when it was the caller's and its stream is gone.
        """


class EntrySource(Protocol):
    """One reader's cursor in one token stream, as the encoders of a transport see it.

    Attributes:
        ended: the terminal entry has been returned.
    """

    ended: bool

    async def next(self, timeout_seconds: float) -> list[StreamEntry]:
        """The next entries in order, each exactly once; empty after a timeout.

        Raises:
            streaming_edge.errors.StreamLost: the stream vanished.
            contracts.token_stream.StreamsUnavailable: this process stops reading.
        """
