"""One child process: started in a group of its own, its output in a bounded file, ended for certain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from ..embedded import Command, die_with_parent

#: A log that grows past this is moved aside once; so a role keeps at most about twice as much.
LOG_BYTES = 16 * 1024 * 1024


class Watchdog:
    """The process that cleans up should this one be killed; see :mod:`infra.stack.watchdog`."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("watchdog.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def started(self, group: int) -> None:
        """A process group now exists."""
        self._tell(f"+{group}\n")

    def ended(self, group: int) -> None:
        """A process group is gone."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End it; kills what it still knows of."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()


class Child:
    """A started program and everything it started in turn.

    Attributes:
        draining: set once it has been seen to drain.
    """

    def __init__(self, process: asyncio.subprocess.Process, watchdog: Watchdog) -> None:
        self._process = process
        self._watchdog = watchdog
        self.draining = asyncio.Event()
        watchdog.started(process.pid)

    @property
    def pid(self) -> int:
        """Its process id, which is its group's too."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Its exit code (negative: the signal), once it has ended and its group has been cleared."""
        code = await self._process.wait()
        self._signal_group(signal.SIGKILL)
        self._watchdog.ended(self.pid)
        return code

    def terminate(self) -> None:
        """Ask it to drain and stop."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def reload(self) -> None:
        """Have a role read its configuration again."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """End it and all it started, now."""
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, sig: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, sig)


async def start_child(
    command: Command, log_file: Path, watchdog: Watchdog, pass_fds: Sequence[int] = ()
) -> Child:
    """Start a program; its output is appended to ``log_file``.

    Args:
        pass_fds: descriptors it inherits, under the same numbers.

    Raises:
        OSError: it cannot be started.
    """
    with _open_log(log_file) as log:
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            env=command.environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_before_exec,
            pass_fds=pass_fds,
        )
    return Child(process, watchdog)


def _before_exec() -> None:
    die_with_parent()
    # Until a role handles it, it waits; by default it would end the process.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def _open_log(log_file: Path) -> IO[bytes]:
    log_file.parent.mkdir(parents=True, exist_ok=True)
    return log_file.open("ab")


def set_aside(log_file: Path) -> None:
    """Keep the log of an earlier run as ``<name>.1``."""
    with contextlib.suppress(FileNotFoundError):
        log_file.replace(_older(log_file))


def bound_log(log_file: Path, limit_bytes: int = LOG_BYTES) -> bool:
    """Move a log that has grown past its bound to ``<name>.1``, while it is written to.

    The writers append, so emptying the file under them is safe; lines written between the copy and the
    emptying are lost.
    """
    try:
        if log_file.stat().st_size <= limit_bytes:
            return False
        shutil.copyfile(log_file, _older(log_file))
        os.truncate(log_file, 0)
    except OSError:
        return False
    return True


def last_words(log_file: Path) -> str:
    """What a process said last: its last line, or the message if that is a structured record."""
    try:
        with log_file.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 4_096))
            lines = log.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    try:
        record = json.loads(line)
    except ValueError:
        return line[:300]
    return str(record.get("message", line))[:300] if isinstance(record, dict) else line[:300]


def _older(log_file: Path) -> Path:
    return log_file.with_name(log_file.name + ".1")
