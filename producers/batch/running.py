"""What runs of a batch, and the room that the batches of a process share."""

from __future__ import annotations

import asyncio


class Slot:
    """Room for one line in the pipeline. Taken from the start; several :meth:`release` are one."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._held = True

    def release(self) -> None:
        """Let another line have it."""
        if self._held:
            self._held = False
            self._slots.release()

    async def take_again(self) -> None:
        """Wait for room once more."""
        await self._slots.acquire()
        self._held = True


class Running:
    """What runs of one batch.

    Attributes:
        ending: set when the batch begins no more lines.
        requests: ids of its requests that may be in the pipeline.
    """

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._pausing = 0
        self._none_pauses = asyncio.Event()
        self._none_pauses.set()
        self.ending = asyncio.Event()
        self.requests: set[str] = set()

    async def slot(self) -> Slot:
        """Room for another line. Waits while lines of this batch are refused: each new one would be, too."""
        await self._none_pauses.wait()
        await self._slots.acquire()
        return Slot(self._slots)

    async def pause(self, slot: Slot, seconds: float) -> bool:
        """Let others have a line's room for a while; whether the batch ends meanwhile."""
        slot.release()
        self._pausing += 1
        self._none_pauses.clear()
        try:
            await asyncio.wait_for(self.ending.wait(), seconds)
        except TimeoutError:
            await slot.take_again()
            return False
        finally:
            self._pausing -= 1
            if not self._pausing:
                self._none_pauses.set()
        return True
