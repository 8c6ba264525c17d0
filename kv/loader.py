"""Loads chunks from the tier into the engine's blocks, beside its own thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .breaker import Breaker
from .codec import HEADER_BYTES, Header
from .errors import ChunkRejected, TierError, TierUnavailable
from .layout import Chunk
from .paged_cache import PagedCache
from .plan import Load
from .store import ChunkStore
from .tally import Tally
from .values import load_value


@dataclass(frozen=True, slots=True)
class Loaded:
    """How the load of one request has ended.

    Attributes:
        request_id: of the engine.
        size: bytes that came.
        seconds: from the first to the last.
        lost: the first chunk that did not come; None = all are there.
        failed_blocks: engine blocks that were not filled.
    """

    request_id: str
    size: int
    seconds: float
    lost: Chunk | None
    failed_blocks: frozenset[int]


@dataclass
class _Job:
    """The loads of one request; its chunks are taken by several threads."""

    request_id: str
    loads: Sequence[Load]
    started: float
    deadline: float
    left: int
    size: int = 0
    cancelled: bool = False
    failed: list[Load] = field(default_factory=list)


class Loader:
    """Threads that load, one connection each. A chunk that fails is reported, never raised."""

    def __init__(
        self,
        store: ChunkStore,
        cache: PagedCache,
        expected: Callable[[Chunk], Header],
        namespace: bytes,
        *,
        threads: int,
        chunk_blocks: int,
        seconds: float,
        tally: Tally,
    ) -> None:
        """A loader of chunks of up to ``chunk_blocks`` blocks.

        Args:
            expected: the header a chunk must have.
            namespace: digest.
            seconds: a request's load that takes longer has failed from there on.
        """
        self._store = store
        self._cache = cache
        self._expected = expected
        self._namespace = namespace
        self._value_bytes = HEADER_BYTES + cache.size(chunk_blocks)
        self._seconds = seconds
        self._tally = tally
        self._breaker = Breaker()
        self._queue: queue.SimpleQueue[tuple[_Job, Load] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._jobs: dict[str, _Job] = {}
        self._ended: list[Loaded] = []
        self._threads = [
            threading.Thread(target=self._run, name=f"kv-load-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request_id: str, loads: Sequence[Load]) -> None:
        """Load these; never blocks. What becomes of it: :meth:`take`."""
        now = time.monotonic()
        job = _Job(request_id, loads, now, now + self._seconds, len(loads))
        with self._changed:
            self._jobs[request_id] = job
        for load in loads:
            self._queue.put((job, load))

    def cancel(self, request_id: str) -> None:
        """Load no more of a request; it still ends, soon."""
        with self._changed:
            if (job := self._jobs.get(request_id)) is not None:
                job.cancelled = True

    def take(self, wait_seconds: float = 0.0) -> list[Loaded]:
        """The loads that have ended since; with ``wait_seconds``, waits for one as long as any runs."""
        with self._changed:
            if wait_seconds and self._jobs and not self._ended:
                self._changed.wait(wait_seconds)
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Stop after the present chunks."""
        with self._changed:
            for job in self._jobs.values():
                job.cancelled = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(self._seconds)

    def _run(self) -> None:
        buffer = self._cache.buffer(self._value_bytes)
        view = memoryview(buffer.numpy())
        with self._cache.stream():
            while (work := self._queue.get()) is not None:
                job, load = work
                size = 0
                try:
                    if not self._is_pointless(job, load):
                        size = self._read(job, load, view)
                        payload = buffer[HEADER_BYTES:size]
                        blocks = load.skip_blocks + len(load.block_ids)
                        self._cache.scatter(payload, blocks, load.skip_blocks, load.block_ids)
                except TierError as error:
                    self._tally.add(f"load_failed_{error.reason}")
                    size = 0
                except Exception:  # whatever it is, the engine can compute what did not come
                    self._tally.add("load_failed_error")
                    size = 0
                self._one_done(job, load, size)

    def _is_pointless(self, job: _Job, load: Load) -> bool:
        if job.cancelled or any(failed.chunk.start < load.chunk.start for failed in job.failed):
            return True
        if time.monotonic() >= job.deadline:
            self._tally.add("load_failed_timeout")
            return True
        return not self._breaker.allows()

    def _read(self, job: _Job, load: Load, view: memoryview) -> int:
        """Bytes of a value that is as it should be, and is in ``view``."""
        left = max(0.001, job.deadline - time.monotonic())
        chunk = load.chunk
        try:
            key = chunk.key(self._namespace)
            payload = load_value(self._store, key, self._expected(chunk), view, left)
        except TierUnavailable:
            self._breaker.failed()
            raise
        except ChunkRejected:
            self._breaker.succeeded()
            raise
        self._breaker.succeeded()
        return HEADER_BYTES + len(payload)

    def _one_done(self, job: _Job, load: Load, size: int) -> None:
        with self._changed:
            job.left -= 1
            job.size += size
            if not size:
                job.failed.append(load)
            if job.left:
                return
            del self._jobs[job.request_id]
            lost = min((f.chunk for f in job.failed), key=lambda chunk: chunk.start, default=None)
            blocks = frozenset(b for failed in job.failed for b in failed.block_ids)
            seconds = time.monotonic() - job.started
            self._ended.append(Loaded(job.request_id, job.size, seconds, lost, blocks))
            self._changed.notify_all()
