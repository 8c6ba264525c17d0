"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

_AGAIN_SECONDS = 0.25


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, again until all have ended; their outcome is dropped.

    Once is not always enough: ``asyncio.wait_for`` of Python 3.11 swallows a cancellation that meets the
    end of what it waits for, and redis-py calls it for every command it sends.
    """
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=_AGAIN_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)
