"""The alarm of a consumer whose positions cannot be committed.

Work that goes on while commits fail is all done again after a restart. Redis hides that from users, but not
from the machines; so once it has lasted, no more records are taken until a commit succeeds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from .telemetry import COMMITS_FAILING

log = logging.getLogger(__name__)

#: What a role says of itself while the alarm is on.
POSITIONS_NOT_COMMITTED = "positions not committed"


class CommitAlarm:
    """Told of every commit; tells whether records may be taken.

    Args:
        patience_seconds: commits may fail for so long before the alarm is on.
        clock: monotonic seconds.
    """

    def __init__(self, patience_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience_seconds
        self._clock = clock
        self._since: float | None = None
        self._told = False
        self._settled = asyncio.Event()
        COMMITS_FAILING.set_function(self.failing_seconds)

    def tried(self) -> None:
        """A commit begins. Until :meth:`settled` it counts as one that fails."""
        if self._since is None:
            self._since = self._clock()
            self._settled.clear()

    def settled(self) -> None:
        """A commit has succeeded, or there is nothing left to commit."""
        self._since = None
        self._settled.set()
        self._tell()

    def failing_seconds(self) -> float:
        """How long no commit has succeeded though one was due; 0 when all is well."""
        return self._clock() - self._since if self._since is not None else 0.0

    def is_on(self) -> bool:
        """Whether no more records may be taken. Logs when that has changed, so ask often."""
        self._tell()
        return self._told

    async def until_off(self) -> None:
        """Return when records may be taken, which is at once unless the alarm is on."""
        if self.is_on():
            await self._settled.wait()

    def _tell(self) -> None:
        on = self._since is not None and self.failing_seconds() >= self._patience
        if on == self._told:
            return
        self._told = on
        if on:
            log.error(
                "positions cannot be committed, no more records are taken",
                extra={"seconds": round(self.failing_seconds(), 1)},
            )
        else:
            log.warning("positions are committed again, records are taken")
