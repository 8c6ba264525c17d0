"""How many lines of batches come into the pipeline at once, and how often."""

from __future__ import annotations

import asyncio

import pytest

from producers.batch.entrance import Entrance
from tests.unit.virtual_time import run_in_virtual_time


async def enter(entrance: Entrance, seconds: float, entered: list[float], left: list[float]) -> None:
    loop = asyncio.get_running_loop()
    async with entrance.place():
        entered.append(round(loop.time(), 6))
        await asyncio.sleep(seconds)
    left.append(round(loop.time(), 6))


def times_of(places: int, share: float, *seconds: float) -> tuple[list[float], list[float]]:
    entered: list[float] = []
    left: list[float] = []

    async def together() -> None:
        entrance = Entrance(places, share)
        await asyncio.gather(*(enter(entrance, s, entered, left) for s in seconds))

    run_in_virtual_time(together())
    return entered, left


def test_a_place_rests_in_proportion_to_what_a_line_took_and_the_line_does_not_wait_for_it() -> None:
    entered, left = times_of(1, 0.25, 0.1, 0.2, 0.1)
    assert entered == [0.0, 0.4, 1.2]
    assert left == [0.1, 0.6, 1.3]


def test_each_place_rests_by_itself() -> None:
    entered, _ = times_of(2, 0.5, 0.1, 0.3, 0.1, 0.1)
    assert entered == [0.0, 0.0, 0.2, 0.4]


def test_a_whole_share_has_no_rests() -> None:
    entered, _ = times_of(1, 1.0, 0.1, 0.1, 0.1)
    assert entered == [0.0, 0.1, 0.2]


def test_what_stood_still_for_long_is_rested_from_for_a_second_at_most() -> None:
    entered, _ = times_of(1, 0.1, 60.0, 0.1)
    assert entered == [0.0, 61.0]


def test_who_fails_or_is_cancelled_inside_leaves_its_place() -> None:
    async def scenario() -> float:
        entrance = Entrance(1, 0.5)
        with pytest.raises(ValueError, match="refused"):
            async with entrance.place():
                raise ValueError("refused")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), entrance.place():
                await asyncio.sleep(60)
        async with entrance.place():
            return asyncio.get_running_loop().time()

    assert run_in_virtual_time(scenario()) == 2.0
