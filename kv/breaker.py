"""Leaves a store alone that does not answer, so that its trouble costs each request nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_FAILURES = 2
_FIRST_SECONDS = 0.5
_LONGEST_SECONDS = 30.0


class Breaker:
    """Open after two failures in a row, for 0.5 s, and twice as long each time up to 30 s.

    When the time is over one caller may try; the others wait for what becomes of that. Of any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = _FIRST_SECONDS
        self._until = 0.0

    @property
    def open(self) -> bool:
        """Whether the store is being left alone."""
        return self._failures >= _FAILURES

    def allows(self) -> bool:
        """Whether to try now."""
        with self._lock:
            if not self.open:
                return True
            now = self._clock()
            if now < self._until:
                return False
            self._pause = min(2 * self._pause, _LONGEST_SECONDS)
            self._until = now + self._pause
            return True

    def succeeded(self) -> None:
        """A call was answered."""
        with self._lock:
            self._failures = 0
            self._pause = _FIRST_SECONDS

    def failed(self) -> None:
        """A call was not answered, or refused."""
        with self._lock:
            self._failures += 1
            if self._failures == _FAILURES:
                self._until = self._clock() + self._pause
