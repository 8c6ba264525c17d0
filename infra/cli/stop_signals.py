"""Commands that go on until somebody stops them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """Set by SIGINT and SIGTERM, which otherwise do nothing for the length of the block."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stopped.set)
    try:
        yield stopped
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
