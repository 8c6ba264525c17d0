"""The seams of the edge: who may come in, how a request is put into the pipeline, what is read of its stream.

The edge owns them and never sees what is behind: ``producers`` implements the first two;
:class:`streaming_edge.hub.Hub` and :class:`infra.stream_redis.RedisTokenStreams` read from Redis, and
:class:`infra.replay.player.Player` is all of them over recordings.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from contracts.entries import StreamEntry
from contracts.identity import Principal
from contracts.limits import Admission
from contracts.stream_ids import StreamId


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


class StreamHub(Protocol):
    """Gives readers their cursors."""

    def subscribe(self, request_id: str, after: StreamId) -> AbstractAsyncContextManager[EntrySource]:
        """Read a stream after an offset that is known to be in it; after the seal, the seal once more."""


class StreamStore(Protocol):
    """What is in a token stream now; see :class:`contracts.token_stream.TokenStreams`.

    Every method raises :class:`contracts.token_stream.StreamsUnavailable` when the store cannot be reached.
    """

    async def read(self, request_id: str, after: StreamId, limit: int) -> list[StreamEntry]:
        """Up to ``limit`` entries after ``after``, in order; empty when there are none (yet)."""

    async def read_all(self, request_id: str) -> list[StreamEntry]:
        """The whole stream as it is now."""

    async def last_ids(self, request_ids: Sequence[str]) -> Sequence[StreamId | None]:
        """Id of each stream's last entry; None where there is no stream."""

    async def has_entry(self, request_id: str, entry_id: StreamId) -> bool:
        """Whether the stream holds an entry with exactly this id."""
