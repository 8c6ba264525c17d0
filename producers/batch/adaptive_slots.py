"""How many lines may be in the pipeline: as many as nobody who waits notices.

The time a line takes through moderation is what a chat takes there, too. It is compared with the time while
hardly any line runs, which is found out again now and then; as long as it is not much longer there is room
for one line more, else for a quarter fewer. So a batch takes what is left of the pipeline, whoever uses it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

#: Lines that are timed before the number is looked at.
_WINDOW = 24
#: What a line's time may be, as a multiple of that while hardly any line runs. It is a part of what a chat
#: waits for; the others grow less.
_TOLERATED = 2.0
#: Lines that run while that time is found out, and the fewest that ever do.
_FEW = 2
#: How often it is found out.
_AGAIN_SECONDS = 30.0


class AdaptiveSlots:
    """A semaphore whose size follows what is measured.

    Attributes:
        limit: lines that may run now.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """At most ``most`` lines, beginning with few."""
        self._most = most
        self._clock = clock
        self._few = min(_FEW, most)
        self.limit = self._few
        self._wanted = self._few
        self._used = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._times: list[float] = []
        self._undisturbed: float | None = None
        self._found_out_at = 0.0
        self._settling = 0

    async def acquire(self) -> None:
        """Wait for room for a line; first come, first served."""
        if self._used < self.limit and not self._waiting:
            self._used += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            else:
                self._waiting.remove(turn)
            raise

    def release(self) -> None:
        """A line needs its room no longer."""
        self._used -= 1
        self._let_in()

    def timed(self, seconds: float) -> None:
        """A line took so long through moderation."""
        if self._settling:
            self._settling -= 1  # begun when more lines ran
            return
        self._times.append(seconds)
        if len(self._times) < _WINDOW:
            return
        mean = sum(self._times) / len(self._times)
        self._times = []
        if self.limit == self._few and (self._undisturbed is None or self._is_due()):
            self._undisturbed = mean
            self._found_out_at = self._clock()
            self.limit = self._wanted
        elif self._is_due():
            self._wanted, self.limit = self.limit, self._few
            self._settling = self._used
        else:
            assert self._undisturbed is not None
            self._adapt(mean / self._undisturbed)
        self._let_in()

    def _is_due(self) -> bool:
        return self._clock() - self._found_out_at >= _AGAIN_SECONDS

    def _adapt(self, ratio: float) -> None:
        if ratio <= _TOLERATED:
            self.limit = min(self._most, self.limit + 1)
        else:
            self.limit = max(self._few, self.limit * 3 // 4)
            self._settling = max(0, self._used - self.limit)

    def _let_in(self) -> None:
        while self._waiting and self._used < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self._used += 1
                turn.set_result(None)
