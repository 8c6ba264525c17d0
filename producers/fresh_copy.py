"""A value in Redis that every request looks at and that changes slowly: read through a copy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from contracts.token_stream import StreamsUnavailable
from infra.tasks import end_tasks

#: The scheduler writes a few times a second, so looking more often than this tells nothing new.
FRESH_SECONDS: Final = 0.2
STALE_SECONDS: Final = 1.0

T = TypeVar("T")


class FreshCopy(Generic[T]):
    """A copy that is at most :data:`STALE_SECONDS` old.

    A copy older than :data:`FRESH_SECONDS` is still used, and renewed meanwhile, so that a steady flow of
    requests does not wait for it.

    Args:
        read: reads the value; raises ``StreamsUnavailable`` when Redis cannot be reached.
        clock: monotonic seconds.
    """

    def __init__(
        self, read: Callable[[], Awaitable[T]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._clock = clock
        self._copy: tuple[float, T] | None = None
        self._renewal: asyncio.Task[None] | None = None

    async def get(self) -> T:
        """The value.

        Raises:
            StreamsUnavailable: the copy is stale and Redis cannot be reached.
        """
        if self._copy is None or (age := self._clock() - self._copy[0]) >= STALE_SECONDS:
            return await self._renew()
        if age >= FRESH_SECONDS and (self._renewal is None or self._renewal.done()):
            self._renewal = asyncio.create_task(self._renew_quietly())
        return self._copy[1]

    async def close(self) -> None:
        """End a renewal under way."""
        if self._renewal is not None:
            await end_tasks([self._renewal])

    async def _renew(self) -> T:
        now = self._clock()
        value = await self._read()
        self._copy = (now, value)
        return value

    async def _renew_quietly(self) -> None:
        try:
            await self._renew()
        except StreamsUnavailable:
            pass  # the copy becomes stale, and then the failure is somebody's answer
