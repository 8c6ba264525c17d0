"""The overload ladder at work in a scheduler: measures, decides, tells everybody, and pauses batch itself."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping

from contracts.degraded import OverloadLevel, OverloadStep
from contracts.tiers import QueueClass
from contracts.token_stream import StreamsUnavailable
from infra.overload_redis import OverloadBoard
from infra.settings import Settings
from infra.telemetry import OVERLOAD_STEP

from .overload import OverloadLadder, StepChange
from .queue_delay import QueueDelays

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5

Pause = Callable[[frozenset[QueueClass]], None]


class OverloadWatch:
    """One ladder per pool, over the requests of this scheduler.

    Each scheduler sees its own share of the queues, and the worst of what they say holds for all.

    Args:
        is_waiting: whether a request stands in the line now.
        now_ms: Unix milliseconds that never go back.
        pause: have these classes wait, and no others.
    """

    def __init__(
        self,
        settings: Settings,
        board: OverloadBoard,
        delays: QueueDelays,
        is_waiting: Callable[[str], bool],
        now_ms: Callable[[], int],
        pause: Pause,
    ) -> None:
        self._settings = settings.overload
        self._board = board
        self._delays = delays
        self._is_waiting = is_waiting
        self._now_ms = now_ms
        self._pause = pause
        self._id = uuid.uuid4().hex
        self._ladders = {p: OverloadLadder(settings.overload, settings.tiers) for p in settings.pools}
        self._paused: frozenset[QueueClass] = frozenset()

    def reconfigure(self, settings: Settings) -> None:
        """Go by these settings from the next look on."""
        self._settings = settings.overload
        for ladder in self._ladders.values():
            ladder.reconfigure(settings.overload, settings.tiers)

    async def run(self) -> None:
        """Look, again and again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Measure once, and act on it."""
        changed = self._observe()
        own = {pool: ladder.level for pool, ladder in self._ladders.items()}
        levels: Mapping[str, OverloadLevel] = own
        try:
            # Silence means normal service, so only what differs from that, or has just ceased to, is said.
            if changed or any(level.step.rank for level in own.values()):
                await self._board.publish(self._id, own)
            levels = await self._board.read()
        except StreamsUnavailable as error:
            log.warning("overload not told", extra={"error": str(error)[:200]})
        for pool in own:
            OVERLOAD_STEP.labels(pool).set(levels.get(pool, OverloadLevel()).step.rank)
        self._apply(levels)

    def _observe(self) -> bool:
        now_ms = self._now_ms()
        delays = self._delays.measure(
            now_ms, self._settings.window_seconds, self._settings.percentile, self._is_waiting
        )
        changed = False
        for pool, ladder in self._ladders.items():
            change = ladder.observe(delays.get(pool, {}), now_ms / 1000)
            if change is not None:
                _say(pool, change)
                changed = True
        return changed

    def _apply(self, levels: Mapping[str, OverloadLevel]) -> None:
        """Batch pauses in every pool while one is overloaded: pools may share what they run on."""
        pauses = any(level.step.reaches(OverloadStep.BATCH_PAUSED) for level in levels.values())
        paused = frozenset({QueueClass.BATCH}) if pauses else frozenset[QueueClass]()
        if paused != self._paused:
            self._paused = paused
            self._pause(paused)


def _say(pool: str, change: StepChange) -> None:
    raised = change.after.rank > change.before.rank
    log.log(
        logging.WARNING if raised else logging.INFO,
        "overload step %s",
        "up" if raised else "down",
        extra={
            "pool": pool,
            "before": change.before.value,
            "after": change.after.value,
            "queue_class": (change.after if raised else change.before).degrades.value,
            "reason": change.reason,
        },
    )
