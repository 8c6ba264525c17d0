"""Kills what a killed supervisor leaves behind.

A file of its own that needs nothing but the standard library: ``headrace up`` starts it, keeps the other
end of its standard input, and tells it of every process group it starts (``+<id>``) or has ended
(``-<id>``). When the input ends, the supervisor is gone, and the groups that are left are killed: also
grandchildren, such as vLLM's engine processes, which no parent-death signal reaches.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def groups_left(lines: Iterable[str]) -> set[int]:
    """Process groups that were announced and not taken back, when the input ends."""
    groups: set[int] = set()
    for line in lines:
        sign, number = line[:1], line[1:].strip()
        if not number.isdigit():
            continue
        if sign == "+":
            groups.add(int(number))
        elif sign == "-":
            groups.discard(int(number))
    return groups


def main() -> None:
    """Watch until the input ends."""
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    for group in groups_left(sys.stdin):
        if group > 1:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
