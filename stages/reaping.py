"""The reaper's shell: keeps the index of open requests true, and ends what nobody has in hand.

Every scheduler process runs one. All of them touch what they hold and look at what nobody touched, and
everything they do is idempotent, so that any number may run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from contracts.entries import Terminal
from contracts.outcome import outcome_of_stream
from contracts.reply import Reply
from contracts.token_stream import Appended, StreamsUnavailable
from infra.kafka import Publisher, PublishError
from infra.open_requests_redis import OpenRequests
from infra.stream_redis import RedisTokenStreams
from infra.telemetry import REAPED, trace_headers

from .reaper import End, Forget, Found, LookAgain, ended_by_reaper, judge

log = logging.getLogger(__name__)

#: Requests looked at in one round.
BATCH = 200


class Reaper:
    """One round every eighth of ``orphan_seconds``, at most every two seconds.

    It judges only after it has itself been at work, without a break, for ``orphan_seconds``: after a start,
    a freeze or a time without Redis the touches of all schedulers are as old as the break.

    Args:
        held: the requests in this process's own scheduler.
    """

    def __init__(
        self,
        index: OpenRequests,
        streams: RedisTokenStreams,
        publisher: Publisher,
        outcomes_topic: str,
        held: Callable[[], list[str]],
        orphan_seconds: float,
        now_ms: Callable[[], int],
    ) -> None:
        self._index = index
        self._streams = streams
        self._publisher = publisher
        self._topic = outcomes_topic
        self._held = held
        self._orphan_ms = int(orphan_seconds * 1000)
        self._interval = min(2.0, orphan_seconds / 8)
        self._now_ms = now_ms
        self._steady_since: float | None = None
        self._last_round = 0.0

    async def run(self) -> None:
        """Reap until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self._round()
            except StreamsUnavailable as error:
                self._steady_since = None
                log.warning("open requests not read", extra={"error": str(error)[:200]})

    async def _round(self) -> None:
        began = time.monotonic()
        if self._steady_since is None or began - self._last_round > self._orphan_ms / 2000:
            self._steady_since = began
        self._last_round = began
        now_ms = self._now_ms()
        await self._index.touch(self._held(), now_ms)
        if began - self._steady_since >= self._orphan_ms / 1000:
            for request_id in await self._index.half_ended(BATCH):
                await self._close(request_id)
            ids = await self._index.untouched(now_ms - self._orphan_ms, BATCH)
            if ids:
                await self._judge(ids, now_ms)

    async def _judge(self, ids: list[str], now_ms: int) -> None:
        # The lease first: a seal deletes it.
        holders = await self._streams.lease_holders(ids)
        last_ids = await self._streams.last_ids(ids)
        heads = await self._streams.accepted_entries(ids)
        born_ms = await self._index.topics_born_ms()
        held = set(self._held())
        for request_id, holder, last, accepted in zip(ids, holders, last_ids, heads, strict=True):
            if request_id in held:  # it came to us this moment
                continue
            found = Found(last, holder is not None, accepted)
            match judge(found, now_ms=now_ms, born_ms=born_ms, orphan_ms=self._orphan_ms):
                case Forget(lost=lost):
                    if lost:
                        log.error("stream of an open request lost", extra={"request_id": request_id})
                    await self._index.drop([request_id])
                case LookAgain(from_ms=from_ms):
                    await self._index.touch([request_id], from_ms)
                case End(terminal=terminal):
                    await self._end(request_id, terminal)
        self._last_round = time.monotonic()

    async def _end(self, request_id: str, terminal: Terminal) -> None:
        """Seal, then publish the outcome; a request that was sealed first is its sealer's to publish."""
        await self._index.ending(request_id)
        if await self._streams.seal(request_id, terminal) is Appended.OK:
            code = terminal.error.code if terminal.error is not None else None
            REAPED.labels(code or "").inc()
            log.warning("open request ended", extra={"request_id": request_id, "code": code})
        else:
            await self._index.drop([request_id])
        await self._close(request_id)

    async def _close(self, request_id: str) -> None:
        """Publish the outcome of a request that a reaper has sealed."""
        reply = Reply().extend(await self._streams.read_all(request_id))
        accepted = reply.accepted
        if accepted is not None and ended_by_reaper(reply.terminal):
            value = outcome_of_stream(request_id, accepted, reply, now_ms=self._now_ms()).encode()
            headers = trace_headers(accepted.traceparent)
            try:
                await self._publisher.send(self._topic, value, key=request_id, headers=headers)
            except PublishError as error:
                log.warning(
                    "outcome not published", extra={"request_id": request_id, "error": str(error)[:200]}
                )
                return
        await self._index.ended(request_id)
