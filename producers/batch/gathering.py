"""Results on their way to the storage: gathered for a while, then written as one segment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from .line_runner import FinishedLine

#: So many bytes are written without waiting for more; whoever brings more waits.
_MAX_BYTES: Final = 4 * 1024 * 1024


class Gathering:
    """Gathers the results of one run of a batch.

    Args:
        write: makes some durable.
        seconds: how long to wait for more, now.
    """

    def __init__(
        self,
        write: Callable[[Sequence[FinishedLine]], Awaitable[None]],
        seconds: Callable[[], float],
    ) -> None:
        self._write = write
        self._seconds = seconds
        self._lines: list[FinishedLine] = []
        self._bytes = 0
        self._finishing = False
        self._now = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def add(self, line: FinishedLine) -> None:
        """Take a result; waits while there are too many."""
        await self._room.wait()
        self._lines.append(line)
        self._bytes += len(line.result.text)
        if self._bytes >= _MAX_BYTES:
            self._room.clear()
            self._now.set()

    def finish(self) -> None:
        """Let :meth:`run` end once everything is written."""
        self._finishing = True
        self._now.set()

    async def run(self) -> None:
        """Write, until :meth:`finish`. Raises what ``write`` raises."""
        while self._lines or not self._finishing:
            try:
                await asyncio.wait_for(self._now.wait(), self._seconds())
            except TimeoutError:
                pass
            self._now.clear()
            lines, self._lines, self._bytes = self._lines, [], 0
            if lines:
                await self._write(lines)
            self._room.set()
