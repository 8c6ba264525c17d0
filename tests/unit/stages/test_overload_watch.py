"""The overload watch over fakes: who is told, who is paused, and what happens without Redis."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from contracts.degraded import OverloadLevel, OverloadStep
from contracts.tiers import QueueClass
from contracts.token_stream import StreamsUnavailable
from infra.settings import Settings, development, parse
from infra.telemetry import OVERLOAD_STEP
from stages.overload_watch import OverloadWatch
from stages.queue_delay import QueueDelays

BATCH = frozenset({QueueClass.BATCH})


class FakeBoard:
    """What was published, and what the others say."""

    def __init__(self) -> None:
        self.said: list[dict[str, OverloadLevel]] = []
        self.others: dict[str, OverloadLevel] = {}
        self.away = False

    async def publish(self, scheduler_id: str, levels: Mapping[str, OverloadLevel]) -> None:
        if self.away:
            raise StreamsUnavailable("away")
        self.said.append(dict(levels))

    async def read(self) -> dict[str, OverloadLevel]:
        if self.away:
            raise StreamsUnavailable("away")
        return self.others or (self.said[-1] if self.said else {})


class Parts:
    def __init__(self, **overload: Any) -> None:
        self.settings = made(**overload)
        self.board = FakeBoard()
        self.delays = QueueDelays()
        self.now_ms = 0
        self.paused: list[frozenset[QueueClass]] = []
        self.watch = OverloadWatch(
            self.settings,
            self.board,  # type: ignore[arg-type]
            self.delays,
            lambda _: True,
            lambda: self.now_ms,
            self.paused.append,
        )

    async def look(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_ms += 1_000
            await self.watch.look()


def made(**overload: Any) -> Settings:
    raw = development("sim").model_dump(mode="json")
    raw["overload"] |= {"raise_seconds": 2, "lower_seconds": 4, **overload}
    return parse(raw)


async def test_a_step_is_said_to_everybody_and_logged_with_who_and_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = Parts()
    parts.delays.joined("r", "default", "paid", 0)
    with caplog.at_level(logging.INFO):
        await parts.look(12)
    assert parts.board.said[0]["default"].step is OverloadStep.BATCH_PAUSED
    assert parts.paused == [BATCH]
    assert OVERLOAD_STEP.labels("default")._value.get() == 1
    (record,) = caplog.records
    assert (record.pool, record.after, record.queue_class) == ("default", "batch_paused", "batch")
    assert "tier paid waits 12.0 s" in record.reason

    parts.delays.left("r")
    await parts.look(20)
    assert parts.board.said[-1]["default"].step is OverloadStep.NORMAL
    assert parts.paused == [BATCH, frozenset()]


async def test_nothing_is_said_while_service_is_normal() -> None:
    parts = Parts()
    parts.delays.joined("r", "default", "paid", 0)
    await parts.look(5)
    assert parts.board.said == []
    assert parts.paused == []


async def test_batch_pauses_for_another_schedulers_word() -> None:
    parts = Parts()
    parts.board.others = {"default": OverloadLevel(OverloadStep.STANDARD_REFUSED, "elsewhere")}
    await parts.look(1)
    assert parts.paused == [BATCH]
    assert OVERLOAD_STEP.labels("default")._value.get() == 5


async def test_without_redis_a_scheduler_goes_by_what_it_sees_itself() -> None:
    parts = Parts()
    parts.board.away = True
    parts.delays.joined("r", "default", "paid", 0)
    await parts.look(13)
    assert parts.paused == [BATCH]


async def test_switched_off_at_run_time_it_lets_go_at_the_next_look() -> None:
    parts = Parts()
    parts.delays.joined("r", "default", "paid", 0)
    await parts.look(20)
    assert parts.paused == [BATCH]
    parts.watch.reconfigure(made(enabled=False))
    await parts.look(1)
    assert parts.paused == [BATCH, frozenset()]
