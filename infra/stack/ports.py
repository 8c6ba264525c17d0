"""Ports of a stack, kept from other stacks of this user for as long as it runs."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO

from ..embedded import LOOPBACK, free_port, port_is_free
from .errors import StackError


class PortKeeper:
    """Picks ports and holds a lock file for each, so that two stacks that start at once never share one.

    A probe alone would not do: both would find 8000 free before either listens.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.gettempdir()) / f"headrace-ports-{os.getuid()}"
        self._held: list[IO[str]] = []

    def given(self, port: int, option: str, host: str = LOOPBACK) -> int:
        """A port the user chose.

        Raises:
            StackError: it is in use.
        """
        if not port_is_free(port, host) or not self._hold(port):
            raise StackError(f"port {port} is in use: give another {option}")
        return port

    def any(self, preferred: int | None = None, host: str = LOOPBACK) -> int:
        """The preferred port if it is free, else some free one."""
        if preferred and port_is_free(preferred, host) and self._hold(preferred):
            return preferred
        for _ in range(50):
            port = free_port()
            if port_is_free(port, host) and self._hold(port):
                return port
        raise StackError("no free port was found")

    def release(self) -> None:
        """Let go of all."""
        for handle in self._held:
            handle.close()
        self._held.clear()

    def _hold(self, port: int) -> bool:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        handle = (self._folder / str(port)).open("a")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.close()
            return False
        self._held.append(handle)
        return True
