"""Saves chunks behind the forward pass: a bounded queue and a thread; under pressure it saves less."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

from .breaker import Breaker
from .codec import Header
from .errors import TierUnavailable
from .layout import Chunk
from .paged_cache import Staged
from .store import ChunkStore
from .tally import Tally
from .values import save_value

log = logging.getLogger(__name__)

_NICENESS = 10


class Saver:
    """A thread that saves what it is given, while the store keeps up."""

    def __init__(
        self,
        store: ChunkStore,
        header: Callable[[Chunk], Header],
        namespace: bytes,
        *,
        queue_bytes: int,
        ttl_ms: int,
        seconds: float,
        tally: Tally,
    ) -> None:
        """A saver whose queue holds up to ``queue_bytes``.

        Args:
            header: what describes a chunk, but for the checksum.
            namespace: digest.
            seconds: deadline of one value.
        """
        self._store = store
        self._header = header
        self._namespace = namespace
        self._queue_bytes = queue_bytes
        self._ttl_ms = ttl_ms
        self._seconds = seconds
        self._tally = tally
        self._breaker = Breaker()
        self._changed = threading.Condition()
        self._queue: deque[tuple[Chunk, Staged]] = deque()
        self._queued = 0
        self._closed = False
        self._names: set[bytes] = set()
        self._thread = threading.Thread(target=self._run, name="kv-save", daemon=True)
        self._thread.start()

    def wants(self, chunk: Chunk, size: int) -> bool:
        """Whether it is worth to gather the blocks of a chunk; if not, that is counted."""
        if chunk.name in self._names:
            return False
        if self._queued + size > self._queue_bytes:
            self._dropped(chunk, "busy")
            return False
        if not self._breaker.allows():
            self._dropped(chunk, "down")
            return False
        return True

    def save(self, chunk: Chunk, staged: Staged) -> None:
        """Save it, later; never blocks."""
        with self._changed:
            self._queue.append((chunk, staged))
            self._queued += staged.data.nbytes
            self._names.add(chunk.name)
            self._changed.notify()
        self._say(chunk, True)

    def close(self) -> None:
        """Stop after the present value; what waits is dropped."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify()
        self._thread.join(self._seconds)

    def _dropped(self, chunk: Chunk, reason: str) -> None:
        self._tally.add(f"save_dropped_{reason}")
        self._say(chunk, False)

    def _say(self, chunk: Chunk, held: bool) -> None:
        """Where a chunk is matters to whoever routes prompts; shorter runs have no name there."""
        if chunk.full:
            self._tally.held([chunk.name], held)

    def _run(self) -> None:
        _be_nice()
        while (work := self._next()) is not None:
            chunk, staged = work
            try:
                self._write(chunk, staged)
            except TierUnavailable as error:
                self._breaker.failed()
                self._dropped(chunk, error.reason)
            except Exception:
                log.exception("a KV chunk could not be saved")
                self._dropped(chunk, "error")
            with self._changed:
                self._names.discard(chunk.name)

    def _next(self) -> tuple[Chunk, Staged] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if self._closed:
                return None
            work = self._queue.popleft()
            self._queued -= work[1].data.nbytes
            return work

    def _write(self, chunk: Chunk, staged: Staged) -> None:
        key, header, payload = chunk.key(self._namespace), self._header(chunk), staged.bytes()
        sent = save_value(self._store, key, header, payload, self._ttl_ms, self._seconds)
        self._breaker.succeeded()
        if sent:
            self._tally.add("saved_chunks")
            self._tally.add("saved_bytes", len(payload))


def _be_nice() -> None:
    """Saving gives way to the engine where both want a core."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    except OSError:
        log.debug("the thread that saves KV chunks keeps its priority")
