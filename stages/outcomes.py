"""Ending requests: the seal in the token stream, then the outcome on Kafka, whoever wrote the seal."""

from __future__ import annotations

import time

from contracts.entries import Terminal
from contracts.errors import ErrorCode, error_body
from contracts.outcome import make_outcome, outcome_of_stream
from contracts.records import OutcomeRecord, QueuedRecord, RequestRecord
from contracts.reply import Reply
from contracts.stream_ids import SEAL
from contracts.tiers import Status
from infra.kafka import Publisher
from infra.stream_redis import RedisTokenStreams
from infra.telemetry import trace_headers

from .retry import until_done

STREAM_LOST = Terminal(
    status=Status.FAILED,
    error=error_body(ErrorCode.STREAM_LOST, "The reply's stream was lost. Please try again."),
)


class Endings:
    """Seals requests and publishes their outcomes.

    Every step is idempotent and repeated until it succeeds, so a caller may commit a request's Kafka
    position once :meth:`end` returns. It never says that a request ended otherwise than its stream does:
    the outcome is made from the stream, whoever sealed it.
    """

    def __init__(self, streams: RedisTokenStreams, publisher: Publisher, outcomes_topic: str) -> None:
        self._streams = streams
        self._publisher = publisher
        self._topic = outcomes_topic

    async def end(
        self, request: RequestRecord | QueuedRecord, terminal: Terminal, traceparent: str | None
    ) -> Status:
        """Seal with ``terminal`` unless the request has ended already; publish how it really ended."""
        await until_done(lambda: self._streams.seal(request.request_id, terminal), "seal")
        return await self.publish(request, traceparent)

    async def end_unread(self, request_id: str, terminal: Terminal) -> None:
        """:meth:`end` for a request whose record cannot be read: its stream says all that is known of it."""
        await until_done(lambda: self._streams.seal(request_id, terminal), "seal")
        reply = await self._sealed(request_id)
        accepted = reply.accepted
        if accepted is not None and reply.terminal is not None:
            outcome = outcome_of_stream(request_id, accepted, reply, now_ms=_now_ms())
            await self._send(outcome, accepted.traceparent)

    async def publish(self, request: RequestRecord | QueuedRecord, traceparent: str | None) -> Status:
        """Publish the outcome of a request that is sealed, or whose stream is gone (then it is lost)."""
        reply = await self._sealed(request.request_id)
        if reply.terminal is None:
            # Expired, or lost with its Redis: there is nothing left that could be sealed.
            reply = Reply(last_id=SEAL, terminal=STREAM_LOST)
        outcome = make_outcome(request, reply, now_ms=_now_ms())
        await self._send(outcome, traceparent)
        return outcome.status

    async def _sealed(self, request_id: str) -> Reply:
        entries = await until_done(lambda: self._streams.read_all(request_id), "read the sealed stream")
        return Reply().extend(entries)

    async def _send(self, outcome: OutcomeRecord, traceparent: str | None) -> None:
        value, headers = outcome.encode(), trace_headers(traceparent)
        await until_done(
            lambda: self._publisher.send(self._topic, value, key=outcome.request_id, headers=headers),
            "publish the outcome",
        )


def _now_ms() -> int:
    return int(time.time() * 1000)
