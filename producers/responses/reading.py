"""Where responses are found: in the store, and as long as that does not know their end, in their streams."""

from __future__ import annotations

from typing import Any, Final

from contracts.entries import Terminal
from contracts.errors import ApiError, ErrorCode, error_body
from contracts.identity import Principal
from contracts.records import Message
from contracts.reply import Reply
from contracts.stored_reply import StoredReply
from contracts.stream_ids import SEAL, StreamId
from contracts.tiers import Status
from infra.stored_replies_redis import StoredReplies
from infra.stream_redis import RedisTokenStreams
from streaming_edge.terminal import terminal_error

from ..refusals import invalid
from .ids import is_response_id, request_id_of
from .objects import Ending, ResponseFacts, ended_response, running_response

KIND: Final = "response"
#: Responses that one may continue through ``previous_response_id``, each the one before it.
MAX_CHAIN: Final = 100
_LOST: Final = Terminal(
    status=Status.FAILED,
    error=error_body(
        ErrorCode.STREAM_LOST, "The response's token stream is gone, and its end is not known."
    ),
)


class ResponseReading:
    """The kept responses of one tenant at a time; unknown and foreign look the same.

    Methods raise ``StreamsUnavailable`` when Redis cannot be reached.
    """

    def __init__(self, streams: RedisTokenStreams, kept: StoredReplies) -> None:
        self._streams = streams
        self._kept = kept

    async def find(self, principal: Principal, response_id: str) -> StoredReply:
        """A kept response; without ``status`` where the store does not know its end yet.

        Raises:
            ApiError: ``not_found``.
        """
        reply = await self._find(principal, response_id)
        if reply is None:
            raise ApiError(ErrorCode.NOT_FOUND, "There is no such response.")
        return reply

    async def now(self, reply: StoredReply) -> dict[str, Any]:
        """A kept response as the API shows it at this moment."""
        facts = ResponseFacts.of_stored(reply)
        reply, last = await self._with_its_end(reply)
        if reply.status is not None:
            return _ended(facts, reply)
        queued = facts.background and not last.attempt
        return running_response(facts, "queued" if queued else "in_progress")

    async def earlier(self, principal: Principal, response_id: str | None) -> list[Message]:
        """What was said in a response and in all that it continues, oldest first.

        Raises:
            ApiError: 400 that names ``previous_response_id``: there is none, it has not completed, it is part
                of a conversation, or it continues too many.
        """
        turns: list[list[Message]] = []
        while response_id is not None:
            if len(turns) == MAX_CHAIN:
                raise invalid("previous_response_id", f"continues more than {MAX_CHAIN} responses.")
            reply = await self._find(principal, response_id)
            if reply is None:
                if turns:
                    break  # what it once continued is no longer kept
                raise ApiError(
                    ErrorCode.NOT_FOUND, "There is no such response.", param="previous_response_id"
                )
            reply, _ = await self._with_its_end(reply)
            if reply.status is not Status.COMPLETED:
                raise invalid("previous_response_id", "names a response that has not completed.")
            if reply.conversation_id is not None:
                raise invalid(
                    "previous_response_id", "is part of a conversation; go on with 'conversation'."
                )
            said = Message(role="assistant", content=_text(reply))
            turns.append([*reply.messages, said])
            response_id = reply.previous_response_id
        return [message for turn in reversed(turns) for message in turn]

    async def _find(self, principal: Principal, response_id: str) -> StoredReply | None:
        if not is_response_id(response_id):
            return None
        reply = await self._kept.get(principal.tenant, request_id_of(response_id))
        return reply if reply is not None and reply.kind == KIND else None

    async def _with_its_end(self, reply: StoredReply) -> tuple[StoredReply, StreamId]:
        """With its stream's end where the store does not know it yet; and how far the stream is."""
        if reply.status is not None:
            return reply, SEAL
        (last,) = await self._streams.last_ids([reply.id])
        if last is not None and not last.is_seal:
            return reply, last
        folded = Reply().extend(await self._streams.read_all(reply.id))
        terminal = folded.terminal or _LOST
        end = {
            "status": terminal.status,
            "choices": folded.outcome_choices(),
            "usage": folded.usage,
            "error": terminal.error,
        }
        return reply.model_copy(update=end), SEAL


def _text(reply: StoredReply) -> str:
    return next((choice.text for choice in reply.choices if choice.index == 0), "")


def _ended(facts: ResponseFacts, reply: StoredReply) -> dict[str, Any]:
    assert reply.status is not None
    error = terminal_error(Terminal(status=reply.status, error=reply.error))
    reasons = [c.finish_reason for c in reply.choices[:1] if c.finish_reason is not None]
    ending = Ending.of_status(reply.status, reasons, error)
    return ended_response(facts, ending, _text(reply), reply.usage, reply.ended)
