"""Leases that are given up while others are renewed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from contracts.stream_ids import StreamId
from contracts.token_stream import Appended
from infra.tasks import end_tasks
from workers.leases import LeaseKeeper


class Reply:
    attempt = 1

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id

    def hung(self, now: float) -> bool:
        return False

    def wrote_since(self, then: float) -> bool:
        return True

    def refused(self, result: Appended | None) -> None:
        raise AssertionError("nobody refuses it")


class SlowStore:
    """Renewals take effect only when the test lets them; givings-up at once."""

    def __init__(self) -> None:
        self.leases: set[str] = set()
        self.renewing = asyncio.Event()
        self.go = asyncio.Event()

    async def renew_leases(self, request_ids: Sequence[str], worker_id: str) -> None:
        self.renewing.set()
        await self.go.wait()
        self.leases |= set(request_ids)

    async def give_up_leases(self, request_ids: Sequence[str], worker_id: str) -> None:
        self.leases -= set(request_ids)

    async def last_ids(self, request_ids: Sequence[str]) -> list[StreamId | None]:
        return [None for _ in request_ids]


async def test_a_lease_that_is_given_up_during_its_renewal_does_not_come_back() -> None:
    store, reply = SlowStore(), Reply("r")
    keeper = LeaseKeeper(store, "w", 60_000)
    running = asyncio.ensure_future(keeper.run())
    try:
        keeper.add(reply)
        await store.renewing.wait()
        keeper.remove(reply)
        giving_up = asyncio.ensure_future(keeper.give_up("r"))
        await asyncio.sleep(0)
        store.go.set()
        await giving_up
        assert store.leases == set()
    finally:
        await end_tasks([running])


async def test_a_lease_that_is_given_up_before_it_was_taken_is_not_taken() -> None:
    store, brief = SlowStore(), Reply("brief")
    keeper = LeaseKeeper(store, "w", 60_000)
    store.go.set()
    running = asyncio.ensure_future(keeper.run())

    async def keep(request_id: str) -> None:
        keeper.add(Reply(request_id))
        async with asyncio.timeout(5):
            while request_id not in store.leases:
                await asyncio.sleep(0)

    try:
        await keep("first")
        keeper.add(brief)
        keeper.remove(brief)
        await keeper.give_up("brief")
        await keep("second")
        assert store.leases == {"first", "second"}
    finally:
        await end_tasks([running])
