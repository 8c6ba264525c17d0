"""Kept replies in a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio as redis

from contracts.stored_reply import StoredReply, ended_reply
from contracts.tiers import Status
from infra.settings import StoredSettings
from infra.stored_replies_redis import StoredReplies
from tests.stored import kept_outcome

KIND = "chat.completion"


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.Redis]:
    client = redis.Redis.from_url(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def replies(client: redis.Redis) -> StoredReplies:
    return StoredReplies(client, StoredSettings())


def ended(number: int = 0, **changes: Any) -> StoredReply:
    reply = ended_reply(kept_outcome(number, **changes))
    assert reply is not None
    return reply


async def ids(replies: StoredReplies, **wanted: Any) -> list[str]:
    """Every page of a list, one after the other."""
    found: list[str] = []
    while True:
        page = await replies.page("t1", KIND, after=found[-1] if found else None, **wanted)
        found += [reply.id for reply in page.replies]
        if not page.has_more:
            return found


async def test_a_reply_is_in_progress_then_as_it_ended(replies: StoredReplies) -> None:
    reply = ended()
    running = reply.model_copy(update={"status": None, "ended": None, "choices": []})
    await replies.put(running)
    assert await replies.get("t1", reply.id) == running
    await replies.put(reply)
    await replies.put(running)
    assert await replies.get("t1", reply.id) == reply


async def test_foreign_unknown_and_malformed_ids_look_the_same_N4(replies: StoredReplies) -> None:
    reply = ended()
    await replies.put(reply)
    for tenant, request_id in (("t2", reply.id), ("t1", ended(1).id), ("t1", "*"), ("t1", "a}:{b")):
        assert await replies.get(tenant, request_id) is None
        assert await replies.set_metadata(tenant, request_id, {"a": "b"}) is None
        assert not await replies.delete(tenant, request_id)
    assert await replies.get("t1", reply.id) == reply


async def test_an_outcome_that_comes_again_changes_nothing_that_came_later(
    replies: StoredReplies,
) -> None:
    reply = ended()
    await replies.put(reply)
    changed = await replies.set_metadata("t1", reply.id, {"new": "1"})
    await replies.put(reply)
    assert changed is not None
    assert await replies.get("t1", reply.id) == changed
    assert changed.metadata == {"new": "1"}


async def test_a_deleted_reply_is_gone_with_its_text_though_its_outcome_comes_again(
    replies: StoredReplies, client: redis.Redis
) -> None:
    reply = ended()
    await replies.put(reply)
    assert await replies.delete("t1", reply.id)
    assert not await replies.delete("t1", reply.id)
    await replies.put(reply)
    assert await replies.get("t1", reply.id) is None
    assert await ids(replies) == []
    left = [await client.hgetall(key) for key in await client.keys("*kept") if b"}:kept" in key]  # type: ignore[misc]
    assert not any(b"Hello" in value or b"Hi" in value for fields in left for value in fields.values())


async def test_a_reply_deleted_before_its_end_is_not_kept(replies: StoredReplies) -> None:
    reply = ended()
    await replies.put(reply.model_copy(update={"status": None, "ended": None}))
    assert await replies.delete("t1", reply.id)
    await replies.put(reply)
    assert await replies.get("t1", reply.id) is None


async def test_pages_join_without_gap_or_repeat_in_both_orders(replies: StoredReplies) -> None:
    for number in (3, 0, 4, 1, 2):
        await replies.put(ended(number))
    oldest_first = [ended(number).id for number in range(5)]
    assert await ids(replies, limit=2) == oldest_first
    assert await ids(replies, limit=2, ascending=False) == oldest_first[::-1]
    page = await replies.page("t1", KIND, limit=5)
    assert [r.messages for r in page.replies] == [[]] * 5
    assert not page.has_more


async def test_a_list_has_what_is_completed_and_passes_the_filters(replies: StoredReplies) -> None:
    for number in range(6):
        await replies.put(ended(number, model="ab"[number % 2], metadata={"n": str(number), "x": "y"}))
    await replies.put(ended(6, status=Status.FAILED))
    await replies.put(ended(7, tenant="t2"))
    assert await ids(replies, limit=1) == [ended(n).id for n in range(6)]
    assert await ids(replies, limit=1, model="b") == [ended(n).id for n in (1, 3, 5)]
    assert await ids(replies, metadata={"x": "y", "n": "4"}) == [ended(4).id]
    assert await ids(replies, metadata={"x": "z"}) == []


async def test_a_list_passes_over_more_than_it_reads_at_once(replies: StoredReplies) -> None:
    for number in range(230):
        await replies.put(ended(number, metadata={"last": str(number >= 228)}))
    assert await ids(replies, metadata={"last": "True"}) == [ended(228).id, ended(229).id]


async def test_the_oldest_make_room(client: redis.Redis) -> None:
    replies = StoredReplies(client, StoredSettings(tenant_replies=2))
    for number in range(4):
        await replies.put(ended(number))
    assert await ids(replies) == [ended(2).id, ended(3).id]
    assert await replies.get("t1", ended(0).id) is None


async def test_everything_has_a_lifetime_and_what_expired_leaves_the_list(
    replies: StoredReplies, client: redis.Redis
) -> None:
    for number in range(2):
        await replies.put(ended(number))
    await replies.set_metadata("t1", ended(1).id, {})
    for key in await client.keys("*"):
        assert await client.ttl(key) > 0
    await client.delete(f"hr:{{{ended(0).id}}}:kept")
    assert await ids(replies) == [ended(1).id]
    assert await ids(replies) == [ended(1).id]
