"""What a conversation's next prompt starts with, and the rule that it has one running request at a time.

A request notes itself as pending *before* it looks at the others. So of two that come at once at least one
sees the other; where both do, both are refused, which a client can repeat, and never do both run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from contracts.conversation import Turn, context_messages, turn_of_reply
from contracts.entries import Terminal
from contracts.errors import ApiError, ErrorCode, error_body
from contracts.identity import time_part
from contracts.records import Message
from contracts.reply import Reply
from contracts.tiers import Status
from contracts.token_stream import StreamsUnavailable
from infra.conversations_redis import Conversations
from infra.settings import Settings
from infra.stream_redis import RedisTokenStreams

from .request_times import created_ms_of, deadline_ms

log = logging.getLogger(__name__)

#: A note without a token stream belongs to a request that is being accepted; older, its gateway died.
_ACCEPTING_MS: Final = 30_000


class ConversationContext:
    """Context of stored conversations. Methods raise ``StreamsUnavailable`` when Redis cannot be reached."""

    def __init__(
        self, settings: Settings, streams: RedisTokenStreams, conversations: Conversations
    ) -> None:
        self._settings = settings
        self._streams = streams
        self._conversations = conversations

    async def claim(
        self,
        tenant: str,
        conversation_id: str,
        request_id: str,
        messages: Sequence[Message],
        now_ms: int,
    ) -> list[Message]:
        """Note ``request_id`` as the conversation's running request; returns the messages before it.

        Raises:
            ApiError: ``conversation_busy`` while another request of the conversation is open; the note
                is taken back.
        """
        await self._conversations.add_pending(tenant, conversation_id, request_id, messages)
        try:
            turns, pending = await self._conversations.load(tenant, conversation_id)
            pending.pop(request_id, None)
            turns += await self._turns_of(tenant, conversation_id, pending, now_ms)
        except BaseException:
            await self.release(tenant, conversation_id, request_id)
            raise
        return context_messages(turns, self._settings.history.max_turns)

    async def turns(self, tenant: str, conversation_id: str) -> list[Turn]:
        """The turns that count, oldest first, as far as they have ended."""
        turns, pending = await self._conversations.load(tenant, conversation_id)
        last_ids = await self._streams.last_ids(list(pending))
        for (request_id, messages), last_id in zip(pending.items(), last_ids, strict=True):
            if last_id is not None and last_id.is_seal:
                turns += await self._ended(request_id, messages)
        return sorted((t for t in turns if t.counts), key=lambda turn: time_part(turn.request_id))

    async def release(self, tenant: str, conversation_id: str, request_id: str) -> None:
        """Take the note back: the request was not accepted. A lost note only makes the next one wait."""
        try:
            await self._conversations.drop_pending(tenant, conversation_id, request_id)
        except StreamsUnavailable:
            log.warning("pending note left behind", extra={"request_id": request_id})

    async def _turns_of(
        self, tenant: str, conversation_id: str, pending: dict[str, list[Message]], now_ms: int
    ) -> list[Turn]:
        """The turns of requests that history has not stored yet, from their own token streams."""
        if not pending:
            return []
        turns: list[Turn] = []
        last_ids = await self._streams.last_ids(list(pending))
        for (request_id, messages), last_id in zip(pending.items(), last_ids, strict=True):
            if last_id is None:
                if now_ms - created_ms_of(request_id) < _ACCEPTING_MS:
                    raise _busy()
                await self._conversations.drop_pending(tenant, conversation_id, request_id)
                continue
            if not last_id.is_seal and not await self._expire(request_id, now_ms):
                raise _busy()
            turns += await self._ended(request_id, messages)
        return turns

    async def _ended(self, request_id: str, messages: list[Message]) -> list[Turn]:
        reply = Reply().extend(await self._streams.read_all(request_id))
        turn = turn_of_reply(request_id, messages, reply)
        return [turn] if turn is not None else []

    async def _expire(self, request_id: str, now_ms: int) -> bool:
        """End a request that nothing has started within its deadline, so that it blocks nobody.

        This is what is left when a gateway dies between a request's stream and its Kafka record: no
        stage will ever see it.
        """
        reply = Reply().extend(await self._streams.read_all(request_id))
        if reply.accepted is None or reply.attempts:
            return False
        if now_ms <= deadline_ms(self._settings, reply.accepted):
            return False
        error = error_body(ErrorCode.DEADLINE_EXCEEDED, "The request was not started in time.")
        await self._streams.seal(request_id, Terminal(status=Status.EXPIRED, error=error))
        return True


def _busy() -> ApiError:
    return ApiError(
        ErrorCode.CONVERSATION_BUSY,
        "Another request of this conversation is still running; wait for its end or cancel it.",
        param="conversation_id",
    )
