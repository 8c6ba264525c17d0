"""Looks prefixes up in the tier beside the engine's own thread, which never waits for Redis."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from .breaker import Breaker
from .errors import TierUnavailable
from .store import ChunkStore

#: Lookups that wait for the thread; more are not made, which is a miss.
_WAITING = 256


@dataclass
class Lookup:
    """One question.

    Attributes:
        deadline: monotonic seconds after which it counts as a miss.
        present: the answer, one for each key; None = none yet.
        failure: why there will be none; None = there may be.
    """

    keys: Sequence[str]
    deadline: float
    started: float = field(default_factory=time.monotonic)
    present: list[bool] | None = None
    failure: str | None = None
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for any more."""
        if self.present is None and self.failure is None and time.monotonic() >= self.deadline:
            self.failure = "timeout"
        return self.present is not None or self.failure is not None


class Lookups:
    """A thread that asks, one round trip for each question."""

    def __init__(self, store: ChunkStore, *, ttl_ms: int, seconds: float) -> None:
        """Lookups that are answered within ``seconds``, or are misses."""
        self._store = store
        self._ttl_ms = ttl_ms
        self._seconds = seconds
        self._breaker = Breaker()
        self._queue: queue.Queue[Lookup | None] = queue.Queue(_WAITING)
        self._answered = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-lookup", daemon=True)
        self._thread.start()

    def ask(self, keys: Sequence[str]) -> Lookup:
        """Ask which keys are there; never blocks. The thread sets the answer."""
        lookup = Lookup(keys, time.monotonic() + self._seconds)
        if not keys:
            lookup.present = []
        elif not self._breaker.allows():
            lookup.failure = "down"
        else:
            try:
                self._queue.put_nowait(lookup)
            except queue.Full:
                lookup.failure = "busy"
        return lookup

    def wait(self, lookups: Sequence[Lookup], seconds: float) -> None:
        """Wait until one of these is over, at most so long."""
        with self._answered:
            self._answered.wait_for(lambda: any(lookup.over for lookup in lookups), seconds)

    def close(self) -> None:
        """Stop when the present question is answered; the others stay unanswered."""
        self._closed = True
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # it looks again when it has taken what is first there

    def _run(self) -> None:
        while (lookup := self._queue.get()) is not None and not self._closed:
            if lookup.over:
                continue
            try:
                present = self._store.touch(lookup.keys, self._ttl_ms, self._seconds)
            except TierUnavailable as error:
                self._breaker.failed()
                self._done(lookup, None, error.reason)
            else:
                self._breaker.succeeded()
                self._done(lookup, present, None)

    def _done(self, lookup: Lookup, present: list[bool] | None, failure: str | None) -> None:
        with self._answered:
            lookup.seconds = time.monotonic() - lookup.started
            if lookup.failure is None:
                lookup.present, lookup.failure = present, failure
            self._answered.notify_all()
