"""``headrace record``: token streams as they are written, for ``headrace play``."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import IO, Any

from redis.exceptions import RedisError

from ..replay.recorder_redis import Recorder
from ..replay.recordings import Recording, recording_object, redacted
from ..replay.turns import Wanted
from ..settings import Settings
from ..stack.errors import StackError
from ..stream_redis import connect
from ..tasks import end_tasks
from .export import write_line, written
from .log import settings_of
from .stop_signals import stop_signals


def record(
    *,
    config: Path | None,
    data_dir: Path,
    output: Path | None,
    wanted: Wanted,
    redact: bool,
    limit: int | None,
) -> int:
    """Record what is accepted from now on, until Ctrl-C or until ``limit`` replies have ended."""
    logging.basicConfig(level="CRITICAL")
    settings = settings_of(config, data_dir)
    with written(output) as file:
        return asyncio.run(record_to(file, settings, wanted, redact=redact, limit=limit))


class _Lines:
    """Writes recordings, up to ``limit``; None = all that come."""

    def __init__(self, file: IO[str], limit: int | None, *, redact: bool) -> None:
        self._file = file
        self._limit = limit
        self._redact = redact
        self.count = 0
        self.full = asyncio.Event()

    def write(self, recording: Recording) -> None:
        """Write one, unless there are enough."""
        if self.full.is_set():
            return
        write_line(self._file, recording_object(redacted(recording) if self._redact else recording))
        self._file.flush()
        self.count += 1
        if self.count == self._limit:
            self.full.set()


async def record_to(
    file: IO[str], settings: Settings, wanted: Wanted, *, redact: bool, limit: int | None
) -> int:
    """:func:`record` into an open file.

    Raises:
        StackError: Redis cannot be reached; what was recorded until then is written.
    """
    lines = _Lines(file, limit, redact=redact)
    client, reader = connect(settings.redis), connect(settings.redis, blocking=True)
    recorder = Recorder(client, reader, wanted, _tell_begun, lines.write)
    try:
        with stop_signals() as stopped:
            await _first_of(recorder.run(), stopped.wait(), lines.full.wait())
    except (RedisError, TimeoutError) as error:
        raise StackError(f"Redis: {type(error).__name__}") from None
    finally:
        for recording in recorder.unfinished():
            lines.write(recording)
        await client.aclose()
        await reader.aclose()
        print(f"{lines.count:,} replies recorded, {recorder.missed:,} missed", file=sys.stderr)
    return 0


def _tell_begun() -> None:
    print("recording what is accepted from now on; Ctrl-C stops", file=sys.stderr)


async def _first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Return or raise when the first one has ended; the others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        await end_tasks(tasks)
