"""Conversations that callers made, and their items, in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis

from contracts.conversation import ConversationFacts, Turn, context_messages, item_position
from contracts.records import Message
from contracts.tiers import Status
from infra.conversation_objects_redis import ConversationObjects
from infra.conversations_redis import Conversations
from infra.settings import HistorySettings
from tests.stored import kept_outcome

FACTS = ConversationFacts(created=1, metadata={"a": "b"})
CONV = "conv_" + "1" * 32


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.Redis]:
    client = redis.Redis.from_url(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def objects(client: redis.Redis) -> ConversationObjects:
    return ConversationObjects(client, HistorySettings())


@pytest.fixture
def turns(client: redis.Redis) -> Conversations:
    return Conversations(client, HistorySettings(max_turns=3))


def added(number: int, *texts: str) -> Turn:
    return Turn(
        request_id=f"items_{number:032x}",
        created_ms=number,
        messages=[Message(role="user", content=text) for text in texts],
        reply=None,
        status=Status.COMPLETED,
    )


async def said(turns: Conversations) -> list[str]:
    stored, _ = await turns.load("t1", CONV)
    return [message.content for message in context_messages(stored, 100)]


async def test_a_conversation_is_its_tenants_alone_N4(objects: ConversationObjects) -> None:
    await objects.create("t1", CONV, FACTS)
    assert await objects.get("t1", CONV) == FACTS
    assert await objects.get("t2", CONV) is None
    assert await objects.set_metadata("t2", CONV, {}) is None
    assert not await objects.delete("t2", CONV)
    assert await objects.get("t1", CONV) == FACTS


async def test_a_deleted_conversation_is_gone_with_its_text(
    objects: ConversationObjects, turns: Conversations, client: redis.Redis
) -> None:
    await objects.create("t1", CONV, FACTS)
    await turns.append("t1", CONV, added(1, "secret"))
    assert await objects.delete("t1", CONV)
    assert not await objects.delete("t1", CONV)
    assert await objects.set_metadata("t1", CONV, {}) is None
    assert await client.keys("hr:conv:*") == []


async def test_the_oldest_make_room(client: redis.Redis) -> None:
    objects = ConversationObjects(client, HistorySettings(tenant_conversations=2))
    made = [f"conv_{number:032x}" for number in range(3)]
    for conversation_id in made:
        await objects.create("t1", conversation_id, FACTS)
    assert [await objects.get("t1", one) is not None for one in made] == [False, True, True]


async def test_everything_lives_as_long_as_the_last_change(
    objects: ConversationObjects, turns: Conversations, client: redis.Redis
) -> None:
    await objects.create("t1", CONV, FACTS)
    for key in await client.keys("*"):
        await client.expire(key, 5)
    await turns.append("t1", CONV, added(1, "a"))
    assert all([await client.ttl(key) > 5 for key in await client.keys("hr:conv:*")])


async def test_what_was_added_and_what_was_answered_are_in_order_of_time_whatever_their_ids(
    turns: Conversations,
) -> None:
    outcome = kept_outcome(conversation_id=CONV)
    late, early = added(outcome.created_ms << 81, "late"), added(1, "early 1", "early 2")
    for turn in (late, early):
        await turns.append("t1", CONV, turn)
    await turns.store(outcome)
    assert await said(turns) == ["early 1", "early 2", "Hi", "Hello", "late"]


async def test_adding_again_changes_nothing_and_the_oldest_turns_make_room(turns: Conversations) -> None:
    for number in (1, 2, 2, 3, 4):
        await turns.append("t1", CONV, added(number, str(number)))
    assert await said(turns) == ["2", "3", "4"]


async def test_a_removed_item_does_not_come_back_with_its_outcome(
    turns: Conversations, client: redis.Redis
) -> None:
    outcome = kept_outcome(conversation_id=CONV)
    await turns.store(outcome)
    (turn,), _ = await turns.load("t1", CONV)
    ids = [item.id for item in turn.items()]
    await turns.remove("t1", CONV, turn, 1)
    await turns.store(outcome)
    assert await said(turns) == ["Hi"]
    (turn,), _ = await turns.load("t1", CONV)
    assert [item.id for item in turn.items()] == ids[:1]
    assert b"Hello" not in b"".join([*(await client.hvals((await client.keys("*turns"))[0]))])  # type: ignore[misc]


async def test_items_removed_at_once_are_all_removed(turns: Conversations) -> None:
    turn = added(1, "a", "b", "c", "d")
    await turns.append("t1", CONV, turn)
    await asyncio.gather(*(turns.remove("t1", CONV, turn, position) for position in (0, 1, 3)))
    assert await said(turns) == ["c"]


def test_an_items_id_leads_to_its_turn_and_nothing_else_does_N4() -> None:
    turn = added(7, "a", "b")
    assert [item_position(item.id) for item in turn.items()] == [(f"{7:032x}", 0), (f"{7:032x}", 1)]
    for wrong in ("", "msg_", "msg_" + "0" * 32, "msg_" + "0" * 32 + "_01", "msg_" + "0" * 32 + "_1\n"):
        assert item_position(wrong) is None
