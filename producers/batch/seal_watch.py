"""Waiting for requests to pass moderation and to end, by looking at the last ids of their streams.

Not by reading the streams as a hub does: of a batch's reply nothing is wanted before its end, and reading
every token as it comes would cost a runner most of its time.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from contracts.stream_ids import MODERATED, StreamId
from contracts.token_stream import StreamsUnavailable
from infra.stream_redis import RedisTokenStreams

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.01
#: Requests that moderation has seen are looked at once in so many turns.
_SELDOM: Final = 10


class _Watched:
    __slots__ = ("ended", "moderated")

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.moderated: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()


class SealWatch:
    """Looks after the requests of one runner; :meth:`run` does the looking."""

    def __init__(self, streams: RedisTokenStreams) -> None:
        self._streams = streams
        self._watched: dict[str, _Watched] = {}
        self._any = asyncio.Event()

    def begin(self, request_id: str) -> None:
        """Look at a request from now on, until :meth:`forget`."""
        self._watched[request_id] = _Watched()
        self._any.set()

    def forget(self, request_id: str) -> None:
        """Look at it no longer."""
        self._watched.pop(request_id, None)

    async def moderated(self, request_id: str) -> None:
        """Return when moderation has let it through, or when it has ended."""
        await self._watched[request_id].moderated

    async def ended(self, request_id: str) -> None:
        """Return when its stream is sealed, or is there no longer."""
        await self._watched[request_id].ended

    async def run(self) -> None:
        """Look, until cancelled."""
        turn = 0
        while True:
            if not self._watched:
                self._any.clear()
                await self._any.wait()
            await asyncio.sleep(_LOOK_SECONDS)
            turn += 1
            all_of_them = turn % _SELDOM == 0
            wanted = [
                request_id
                for request_id, watched in self._watched.items()
                if all_of_them or not watched.moderated.done()
            ]
            if not wanted:
                continue
            try:
                last_ids = await self._streams.last_ids(wanted)
            except StreamsUnavailable as error:
                log.warning("requests not looked at", extra={"error": str(error)[:200]})
                continue
            for request_id, last in zip(wanted, last_ids, strict=True):
                self._seen(request_id, last)

    def _seen(self, request_id: str, last: StreamId | None) -> None:
        watched = self._watched.get(request_id)
        if watched is None:
            return
        if (last is None or last >= MODERATED) and not watched.moderated.done():
            watched.moderated.set_result(None)
        if (last is None or last.is_seal) and not watched.ended.done():
            watched.ended.set_result(None)
