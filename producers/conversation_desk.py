"""What the Conversations API does, for one tenant at a time; unknown and foreign look the same."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from contracts.conversation import ConversationFacts, Item, Turn, item_position
from contracts.errors import ApiError, ErrorCode
from contracts.identity import Principal, make_time_id, time_part
from contracts.records import Message
from contracts.tiers import Status
from infra.conversation_objects_redis import ConversationObjects
from infra.conversations_redis import Conversations

from .conversation_context import ConversationContext
from .conversation_shapes import is_conversation_id
from .request_times import unix_ms


class ConversationDesk:
    """Makes, changes and reads conversations.

    A request that names one as its ``conversation_id`` goes on after its items and adds to them when it has
    ended; nothing else has to be done for that. All methods but :meth:`create` raise :class:`ApiError`
    ``not_found`` where the caller has no such conversation.
    """

    def __init__(
        self, objects: ConversationObjects, conversations: Conversations, context: ConversationContext
    ) -> None:
        self._objects = objects
        self._conversations = conversations
        self._context = context

    async def create(
        self, principal: Principal, messages: list[Message], metadata: dict[str, str]
    ) -> tuple[str, ConversationFacts]:
        """Make a conversation that starts with these messages; returns its id."""
        now_ms = unix_ms()
        conversation_id = f"conv_{make_time_id(now_ms, secrets.token_bytes(10))}"
        facts = ConversationFacts(created=now_ms // 1000, metadata=metadata)
        if messages:
            await self._append(principal, conversation_id, messages)
        await self._objects.create(principal.tenant, conversation_id, facts)
        return conversation_id, facts

    async def get(self, principal: Principal, conversation_id: str) -> ConversationFacts:
        """What is known of a conversation."""
        return _found(
            await self._objects.get(principal.tenant, conversation_id)
            if is_conversation_id(conversation_id)
            else None
        )

    async def set_metadata(
        self, principal: Principal, conversation_id: str, metadata: Mapping[str, str]
    ) -> ConversationFacts:
        """Replace the metadata."""
        await self.get(principal, conversation_id)
        return _found(await self._objects.set_metadata(principal.tenant, conversation_id, metadata))

    async def delete(self, principal: Principal, conversation_id: str) -> None:
        """Delete a conversation with its items."""
        await self.get(principal, conversation_id)
        await self._objects.delete(principal.tenant, conversation_id)

    async def items(self, principal: Principal, conversation_id: str) -> list[Item]:
        """Everything that was said, oldest first, replies that have ended included."""
        await self.get(principal, conversation_id)
        turns = await self._context.turns(principal.tenant, conversation_id)
        return [item for turn in turns for item in turn.items()]

    async def add_items(
        self, principal: Principal, conversation_id: str, messages: list[Message]
    ) -> list[Item]:
        """Add messages at the end, as one turn; returns them as items."""
        await self.get(principal, conversation_id)
        return (await self._append(principal, conversation_id, messages)).items()

    async def remove_item(
        self, principal: Principal, conversation_id: str, item_id: str
    ) -> ConversationFacts:
        """Take an item out for good; returns the conversation."""
        facts = await self.get(principal, conversation_id)
        wanted = item_position(item_id)
        for turn in await self._context.turns(principal.tenant, conversation_id):
            if wanted is not None and time_part(turn.request_id) == wanted[0]:
                if all(item.id != item_id for item in turn.items()):
                    break
                await self._conversations.remove(principal.tenant, conversation_id, turn, wanted[1])
                return facts
        raise no_such_item()

    async def _append(self, principal: Principal, conversation_id: str, messages: list[Message]) -> Turn:
        now_ms = unix_ms()
        turn = Turn(
            request_id=f"items_{make_time_id(now_ms, secrets.token_bytes(10))}",
            created_ms=now_ms,
            messages=messages,
            reply=None,
            status=Status.COMPLETED,
        )
        await self._conversations.append(principal.tenant, conversation_id, turn)
        return turn


def no_such_item() -> ApiError:
    """The conversation has no item with this id."""
    return ApiError(ErrorCode.NOT_FOUND, "There is no such item in this conversation.")


def _found(facts: ConversationFacts | None) -> ConversationFacts:
    if facts is None:
        raise ApiError(ErrorCode.NOT_FOUND, "There is no such conversation.")
    return facts
