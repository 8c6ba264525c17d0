from __future__ import annotations

import asyncio

import pytest

from contracts.token_stream import StreamsUnavailable
from producers.fresh_copy import FRESH_SECONDS, STALE_SECONDS, FreshCopy


class Store:
    def __init__(self) -> None:
        self.value = 1
        self.reads = 0
        self.away = False
        self.now = 0.0
        self.copy = FreshCopy(self.read, lambda: self.now)

    async def read(self) -> int:
        self.reads += 1
        if self.away:
            raise StreamsUnavailable("away")
        return self.value


async def test_a_fresh_copy_is_not_read_again() -> None:
    store = Store()
    assert await store.copy.get() == 1
    store.value = 2
    store.now = FRESH_SECONDS * 0.9
    assert await store.copy.get() == 1
    assert store.reads == 1


async def test_an_older_one_is_used_and_renewed_meanwhile_by_one_read() -> None:
    store = Store()
    await store.copy.get()
    store.value = 2
    store.now = FRESH_SECONDS
    assert [await store.copy.get(), await store.copy.get()] == [1, 1]
    await asyncio.sleep(0)
    assert await store.copy.get() == 2
    assert store.reads == 2
    await store.copy.close()


async def test_a_stale_one_is_never_used_and_a_failed_renewal_is_nobodys_answer() -> None:
    store = Store()
    await store.copy.get()
    store.away = True
    store.now = STALE_SECONDS * 0.9
    assert await store.copy.get() == 1
    await asyncio.sleep(0)
    store.now = STALE_SECONDS
    with pytest.raises(StreamsUnavailable):
        await store.copy.get()
    store.away = False
    assert await store.copy.get() == 1
