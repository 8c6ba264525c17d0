"""Telling the rest of the system which requests this process reads."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Iterator
from itertools import islice

from contracts.token_stream import StreamsUnavailable
from infra.presence_redis import ReaderPresence

log = logging.getLogger(__name__)

_REFRESH_SECONDS = 1.0
#: Readers that come and go within this time are told of in one round trip, or not at all.
_GATHER_SECONDS = 0.05
_BATCH = 512


class Voucher:
    """Vouches for the readers of one hub: at once when a first one comes or a last one leaves, and anew
    every second. While Redis is away nothing is lost but time: all is told again when it is back.

    Args:
        reading: the requests that have readers here and are not sealed.
    """

    def __init__(self, presence: ReaderPresence, reading: Callable[[], Collection[str]]) -> None:
        self._presence = presence
        self._reading = reading
        self._hub = secrets.token_hex(8)
        self._came: set[str] = set()
        self._left: set[str] = set()
        self._changed = asyncio.Event()

    def came(self, request_id: str) -> None:
        """A request has its first reader here."""
        self._left.discard(request_id)
        self._came.add(request_id)
        self._changed.set()

    def left(self, request_id: str) -> None:
        """A request has lost its last reader here."""
        self._came.discard(request_id)
        self._left.add(request_id)
        self._changed.set()

    def gone(self, request_id: str) -> None:
        """A request needs no word from us any more: it is sealed, or its readers go on elsewhere."""
        self._came.discard(request_id)

    async def run(self) -> None:
        """Tell until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time() + _REFRESH_SECONDS
        while True:
            try:
                async with asyncio.timeout_at(due):
                    await self._changed.wait()
                    await asyncio.sleep(_GATHER_SECONDS)
            except TimeoutError:
                pass
            self._changed.clear()
            if loop.time() >= due:
                due = loop.time() + _REFRESH_SECONDS
                self._came.update(self._reading())
            await self._tell()

    async def _tell(self) -> None:
        came, self._came = self._came, set()
        left, self._left = self._left, set()
        try:
            for some in _batches(came):
                await self._presence.vouch(self._hub, some, ())
            for some in _batches(left):
                await self._presence.vouch(self._hub, (), some)
        except StreamsUnavailable as error:
            log.warning("readers not told of", extra={"error": str(error)[:200]})
            # Who came is told of with the next refresh; who left must not be forgotten.
            self._left |= left - self._came - set(self._reading())


def _batches(ids: Collection[str]) -> Iterator[list[str]]:
    rest = iter(ids)
    while batch := list(islice(rest, _BATCH)):
        yield batch
