"""Leaving a reply when its client or its gateway goes, and only then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from producers.replies import ClientLeft, GatewayLeaving, Replies


class Client:
    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def wait_in(replies: Replies, client: Client) -> None:
    async with replies.watch(client.receive):
        await asyncio.Event().wait()


async def opened(replies: Replies, task: asyncio.Task[None]) -> None:
    while not replies.count:
        assert not task.done()
        await asyncio.sleep(0)


async def test_a_client_that_goes_ends_its_reply_only() -> None:
    replies, one, two = Replies(), Client(), Client()
    first = asyncio.create_task(wait_in(replies, one))
    second = asyncio.create_task(wait_in(replies, two))
    await opened(replies, first)
    one.gone.set()
    with pytest.raises(ClientLeft):
        await first
    assert first.cancelling() == 0
    assert not second.done()
    replies.end_all()
    with pytest.raises(GatewayLeaving):
        await second
    assert replies.count == 0


async def test_a_reply_that_begins_when_all_are_being_ended_ends_too() -> None:
    replies, client = Replies(), Client()
    replies.closing = True
    replies.end_all()
    with pytest.raises(GatewayLeaving):
        await wait_in(replies, client)
    assert replies.count == 0


async def test_a_foreign_cancellation_stays_one() -> None:
    replies, client = Replies(), Client()
    task = asyncio.create_task(wait_in(replies, client))
    await opened(replies, task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await replies.wait_empty(1)


async def test_a_foreign_cancellation_wins_over_a_client_that_goes_too() -> None:
    replies, client = Replies(), Client()
    task = asyncio.create_task(wait_in(replies, client))
    await opened(replies, task)
    replies.end_all()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_inside_is_not_hidden() -> None:
    replies, client = Replies(), Client()
    with pytest.raises(KeyError):
        async with replies.watch(client.receive):
            raise KeyError
    assert replies.count == 0


async def test_requests_being_accepted_count_as_open() -> None:
    replies = Replies()
    with replies.accepting():
        assert not await replies.wait_empty(0)
    assert await replies.wait_empty(0)
