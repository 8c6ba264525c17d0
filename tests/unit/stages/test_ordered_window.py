"""G4 in miniature: records of a partition are acknowledged in order, whatever order they finish in."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stages.faust_app import OrderedWindow


@dataclass(frozen=True)
class Record:
    partition: int
    offset: int
    topic: str = "t"
    value: bytes | None = None
    headers: Any = None


@dataclass
class Bench:
    """A window whose handlers end when told to."""

    size: int = 100
    acknowledged: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gates: dict[tuple[int, int], asyncio.Future[None]] = {}
        self.window = OrderedWindow(self._handle, self.size)

    async def _handle(self, record: Any) -> None:
        gate = self.gates[record.partition, record.offset] = asyncio.get_running_loop().create_future()
        await gate

    async def add(self, partition: int, offset: int) -> None:
        place = (partition, offset)
        await self.window.add(Record(*place), lambda: self.acknowledged.append(place))
        await asyncio.sleep(0)

    async def finish(self, partition: int, offset: int) -> None:
        self.gates[partition, offset].set_result(None)
        for _ in range(3):
            await asyncio.sleep(0)


@given(st.permutations([(p, o) for p in range(2) for o in range(5)]))
def test_g4_acknowledges_a_partition_only_up_to_its_first_gap(order: list[tuple[int, int]]) -> None:
    async def check() -> None:
        bench = Bench()
        for partition in range(2):
            for offset in range(5):
                await bench.add(partition, offset)
        finished: set[tuple[int, int]] = set()
        for place in order:
            await bench.finish(*place)
            finished.add(place)
            for partition in range(2):
                got = [o for p, o in bench.acknowledged if p == partition]
                contiguous = 0
                while (partition, contiguous) in finished:
                    contiguous += 1
                assert got == list(range(contiguous))
        assert bench.window.in_hand == 0

    asyncio.run(check())


async def test_takes_no_more_than_its_size_at_once() -> None:
    bench = Bench(size=2)
    await bench.add(0, 0)
    await bench.add(0, 1)
    third = asyncio.ensure_future(bench.add(0, 2))
    await asyncio.sleep(0.01)
    assert not third.done()
    await bench.finish(0, 1)
    assert not third.done(), "finished out of order: still in hand"
    await bench.finish(0, 0)
    await asyncio.wait_for(third, 1)
    await bench.finish(0, 2)


async def test_acknowledges_nothing_after_a_handler_broke_its_promise() -> None:
    bench = Bench()
    for offset in range(3):
        await bench.add(0, offset)
    bench.gates[0, 0].set_exception(RuntimeError("bug"))
    await bench.finish(0, 1)
    await bench.finish(0, 2)
    assert bench.acknowledged == []
    assert bench.window.failed.is_set()
    assert isinstance(bench.window.failure, RuntimeError)


async def test_closing_waits_then_cancels_and_leaves_the_cancelled_unacknowledged() -> None:
    bench = Bench()
    await bench.add(0, 0)
    await bench.add(0, 1)
    closing = asyncio.ensure_future(bench.window.close(0.05))
    await bench.finish(0, 0)
    await asyncio.wait_for(closing, 2)
    assert bench.acknowledged == [(0, 0)]
