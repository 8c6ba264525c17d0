"""Redis servers for tests that compare several, or that must restart one."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from infra.embedded import LOOPBACK, free_port, redis_answers, redis_command, running

#: The embedded Valkey, and the machine's own Redis where it has one.
SERVERS = ["valkey", *(["redis"] if shutil.which("redis-server") else [])]


class RedisServer:
    """A server on a fixed port that can be stopped, killed, started again and emptied.

    Args:
        options: more of the server's own options, e.g. ``{"maxmemory": "20mb"}``.
    """

    def __init__(self, kind: str, folder: Path, options: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self._folder = folder
        command = redis_command(self.port, folder / "data")
        if kind == "redis":
            binary = shutil.which("redis-server")
            assert binary is not None
            command = replace(command, argv=(binary, *command.argv[1:]))
        more = [part for name, value in (options or {}).items() for part in (f"--{name}", value)]
        command = replace(command, argv=(*command.argv, *more))
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.port}/0"

    def start(self) -> None:
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 15
        while not redis_answers(LOOPBACK, self.port):
            assert self._process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    @property
    def data(self) -> Path:
        """Where it keeps its append-only file."""
        return self._folder / "data"

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(10)
            self._process = None


@contextmanager
def restartable(kind: str, folder: Path, options: dict[str, str] | None = None) -> Iterator[RedisServer]:
    server = RedisServer(kind, folder, options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def server_url(kind: str, folder: Path) -> Iterator[str]:
    """URL of a server of that kind for the length of a block."""
    server = RedisServer(kind, folder)
    with running(server._command, lambda: redis_answers(LOOPBACK, server.port), folder / "redis.log"):
        yield server.url
