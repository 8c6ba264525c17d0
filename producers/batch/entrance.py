"""Where lines enter the pipeline: few at once, and with rests in between, so that a chat finds room there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

#: A moderation that stood still is not rested from for as long as it stood.
_LONGEST_REST_SECONDS: Final = 1.0


class Entrance:
    """Lets ``places`` lines in at once, each place in use for ``share`` of the time.

    A place rests in proportion to what its line took to get through: where the pipeline has become slow,
    lines come more slowly.
    """

    def __init__(self, places: int, share: float) -> None:
        self._places = asyncio.Semaphore(places)
        self._rest = 1 / share - 1

    @asynccontextmanager
    async def place(self) -> AsyncGenerator[None]:
        """A place to go through; it rests afterwards, and whoever has gone through does not wait for that."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        entered = loop.time()
        try:
            yield
        finally:
            rest = min(_LONGEST_REST_SECONDS, self._rest * (loop.time() - entered))
            loop.call_later(rest, self._places.release)
