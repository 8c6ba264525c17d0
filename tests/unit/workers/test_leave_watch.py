"""The worker's watch over readers, on virtual sightings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from contracts.absence import NOBODY, Sighting
from contracts.entries import Terminal
from contracts.tiers import Status
from contracts.token_stream import Appended, StreamsUnavailable
from workers.leaving import LeaveWatch


@dataclass
class Reply:
    request_id: str
    leave_grace_ms: int | None = 0
    accepted_ms: int = 0
    results: list[Appended | None] = field(default_factory=list)

    def refused(self, result: Appended | None) -> None:
        self.results.append(result)


class Store:
    def __init__(self) -> None:
        self.now_ms = 10_000
        self.sightings: dict[str, Sighting] = {}
        self.sealed: dict[str, Terminal] = {}
        self.answer = Appended.OK
        self.down = False
        self.looks: list[list[str]] = []

    async def look(self, request_ids: Sequence[str]) -> tuple[int, list[Sighting]]:
        self.looks.append(list(request_ids))
        if self.down:
            raise StreamsUnavailable("down")
        return self.now_ms, [self.sightings.get(i, NOBODY) for i in request_ids]

    async def seal_many(self, seals: Sequence[tuple[str, Terminal]]) -> list[Appended]:
        self.sealed |= dict(seals)
        return [self.answer for _ in seals]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_left_reply_is_sealed_cancelled_and_stopped_and_others_go_on_d1() -> None:
    store = Store()
    watch = LeaveWatch(store, store)
    left, read, unwatched = Reply("left"), Reply("read"), Reply("batch", leave_grace_ms=None)
    store.sightings = {"left": Sighting(0, 9_000), "read": Sighting(12_000, 9_000)}
    for reply in (left, read, unwatched):
        watch.add(reply)
    await watch._look()
    assert store.looks == [["left", "read"]]
    assert {i: t.status for i, t in store.sealed.items()} == {"left": Status.CANCELLED}
    assert (left.results, read.results) == ([Appended.SEALED], [])


async def test_a_reply_that_ended_meanwhile_is_left_to_its_own_writes() -> None:
    store = Store()
    store.answer = Appended.SEALED
    watch, reply = LeaveWatch(store, store), Reply("r")
    store.sightings = {"r": Sighting(0, 9_000)}
    watch.add(reply)
    await watch._look()
    assert reply.results == []
    watch.remove(reply)
    watch.remove(reply)
    await watch._look()
    assert store.looks[-1] == []


async def test_a_store_that_is_away_ends_nothing_and_not_the_watch() -> None:
    store = Store()
    store.down = True
    watch, reply = LeaveWatch(store, store), Reply("r")
    store.sightings = {"r": Sighting(0, 9_000)}
    watch.add(reply)
    running = asyncio.create_task(watch.run())
    await until(lambda: bool(store.looks))
    assert not store.sealed
    store.down = False
    await until(lambda: bool(reply.results))
    running.cancel()
