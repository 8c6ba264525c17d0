"""Waiting for requests by the last ids of their streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from contracts.stream_ids import ACCEPTED, SEAL, StreamId
from contracts.token_stream import StreamsUnavailable
from infra.tasks import end_tasks
from producers.batch.seal_watch import SealWatch


class Streams:
    def __init__(self) -> None:
        self.last: dict[str, StreamId | None] = {}
        self.asked: list[list[str]] = []
        self.down = False

    async def last_ids(self, request_ids: Sequence[str]) -> list[StreamId | None]:
        self.asked.append(list(request_ids))
        if self.down:
            raise StreamsUnavailable("down")
        return [self.last.get(request_id) for request_id in request_ids]


@pytest.fixture
def streams() -> Streams:
    return Streams()


@pytest.fixture
async def watch(streams: Streams) -> AsyncIterator[SealWatch]:
    watch = SealWatch(cast(Any, streams))
    running = asyncio.create_task(watch.run())
    yield watch
    await end_tasks([running])


async def test_moderation_and_the_end_are_told_apart(watch: SealWatch, streams: Streams) -> None:
    streams.last["r"] = ACCEPTED
    watch.begin("r")
    moderated = asyncio.create_task(watch.moderated("r"))
    ended = asyncio.create_task(watch.ended("r"))
    streams.last["r"] = StreamId(1, 5)
    await asyncio.wait_for(moderated, 5)
    assert not ended.done()
    streams.last["r"] = SEAL
    await asyncio.wait_for(ended, 5)


async def test_a_stream_that_is_gone_has_ended(watch: SealWatch, streams: Streams) -> None:
    streams.last["r"] = None
    watch.begin("r")
    await asyncio.wait_for(asyncio.gather(watch.moderated("r"), watch.ended("r")), 5)


async def test_a_redis_that_is_away_is_asked_again(watch: SealWatch, streams: Streams) -> None:
    streams.down = True
    streams.last["r"] = SEAL
    watch.begin("r")
    while len(streams.asked) < 2:
        await asyncio.sleep(0)
    streams.down = False
    await asyncio.wait_for(watch.ended("r"), 5)
