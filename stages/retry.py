"""Waiting out trouble with Redis or Kafka: the effect is repeated in place until it succeeds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from contracts.token_stream import StreamsUnavailable
from infra.kafka import PublishError

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_WAIT_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 2.0


async def until_done(operation: Callable[[], Awaitable[T]], what: str) -> T:
    """Run ``operation`` until it neither loses Redis nor Kafka; other exceptions pass through.

    Every effect of the stages is idempotent by request id or stream id, so repeating one that may have
    been applied is safe, and skipping one never is. Each try has the deadline of its client, waits grow to
    two seconds. Cancelling ends it; whoever cancels leaves the record's position uncommitted.
    """
    wait = FIRST_WAIT_SECONDS
    while True:
        try:
            return await operation()
        except (StreamsUnavailable, PublishError) as error:
            log.warning("trying again", extra={"what": what, "error": str(error)[:200]})
        await asyncio.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT_SECONDS)
