"""Jobs of many rows on threads of their own: a bounded queue, deadlines, and an exact account of each job."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .breaker import Breaker
from .errors import ChunkRejected, TierUnavailable
from .host_rows import Row
from .tally import Tally

log = logging.getLogger(__name__)

#: A call may take its deadline several times over: to connect, to send each part, to be answered.
_DEADLINES = 5
_MARGIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a job.

    Attributes:
        job_id: as it was submitted.
        moved / lost: keys of its rows; together they are all.
        size: bytes that were moved.
        seconds: from its submission to its end.
    """

    job_id: int
    moved: tuple[bytes, ...]
    lost: tuple[bytes, ...]
    size: int
    seconds: float


@dataclass
class _Job:
    job_id: int
    started: float
    left: int
    moved: list[bytes] = field(default_factory=list)
    lost: list[bytes] = field(default_factory=list)
    size: int = 0


class Lane:
    """Threads that move rows one way. A row that cannot be moved is lost and counted, never raised.

    Every job that was submitted ends, and is taken once.
    """

    def __init__(
        self,
        name: str,
        move: Callable[[Row, float], int],
        *,
        threads: int,
        rows: int,
        seconds: float,
        whole_jobs: bool,
        tally: Tally,
        failure: str,
    ) -> None:
        """A lane that ``move`` s rows within so many seconds; see :class:`kv.host_rows.HostRows`.

        Args:
            rows: that wait, at most; of a job that is longer the first ones are kept.
            seconds: for each row, or for the whole job from its submission on (``whole_jobs``).
            failure: what a lost row is counted as, followed by the reason.
        """
        self._move = move
        self._rows = rows
        self._seconds = seconds
        self._whole_jobs = whole_jobs
        self._tally = tally
        self._failure = failure
        self._breaker = Breaker()
        self._changed = threading.Condition()
        self._queue: deque[tuple[_Job, Row]] = deque()
        self._jobs: dict[int, _Job] = {}
        self._ended: list[Ended] = []
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job_id: int, rows: Sequence[Row]) -> None:
        """Move these; never blocks. What becomes of it: :meth:`take`."""
        with self._changed:
            job = self._jobs[job_id] = _Job(job_id, time.monotonic(), len(rows))
            room = 0 if self._closed else self._rows - len(self._queue)
            self._queue.extend((job, row) for row in rows[:room])
            for row in rows[room:]:
                self._lose(job, row, "busy")
            self._end_if_over(job)
            self._changed.notify_all()

    def take(self) -> list[Ended]:
        """The jobs that have ended since."""
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Give up what has not begun and wait for the rest; then nothing is moving, and all jobs ended.

        Raises:
            TimeoutError: a row is still moving, long after its deadline.
        """
        with self._changed:
            while self._queue:
                job, row = self._queue.popleft()
                self._lose(job, row, "cancelled")
                self._end_if_over(job)
            patience = _DEADLINES * self._seconds + _MARGIN_SECONDS
            if not self._changed.wait_for(lambda: not self._jobs, patience):
                raise TimeoutError("a KV chunk is still being moved")

    def close(self) -> None:
        """Drain, and end the threads. What is submitted from now on is lost.

        Raises:
            TimeoutError: see :meth:`drain`.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.drain()
        for thread in self._threads:
            thread.join(_MARGIN_SECONDS)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            job, row = work
            size, reason = self._attempt(job, row)
            with self._changed:
                if reason is None:
                    job.moved.append(row.key)
                    job.size += size
                    job.left -= 1
                else:
                    self._lose(job, row, reason)
                self._end_if_over(job)

    def _next(self) -> tuple[_Job, Row] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return self._queue.popleft() if self._queue else None

    def _attempt(self, job: _Job, row: Row) -> tuple[int, str | None]:
        """Bytes that were moved, and why the row was lost; None = it was not."""
        left = self._seconds
        if self._whole_jobs:
            left += job.started - time.monotonic()
        if left <= 0:
            return 0, "timeout"
        if not self._breaker.allows():
            return 0, "down"
        size, reason = 0, None
        try:
            size = self._move(row, left)
        except ChunkRejected as error:
            reason = error.reason
        except TierUnavailable as error:
            self._breaker.failed()
            return 0, error.reason
        except Exception:
            log.exception("a KV chunk could not be moved")
            return 0, "error"
        self._breaker.succeeded()
        return size, reason

    def _lose(self, job: _Job, row: Row, reason: str) -> None:
        self._tally.add(f"{self._failure}_{reason}")
        job.lost.append(row.key)
        job.left -= 1

    def _end_if_over(self, job: _Job) -> None:
        if job.left:
            return
        del self._jobs[job.job_id]
        seconds = time.monotonic() - job.started
        self._ended.append(Ended(job.job_id, tuple(job.moved), tuple(job.lost), job.size, seconds))
        self._changed.notify_all()
