"""The two meanings of SIGHUP: "read your configuration again", and "your terminal is gone"."""

from __future__ import annotations

import os


class Terminal:
    """The controlling terminal this process started with, if any."""

    def __init__(self) -> None:
        self._had_one = _has_terminal()

    def is_gone(self) -> bool:
        """Whether it was closed since: then nobody is there to stop a foreground process."""
        return self._had_one and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
