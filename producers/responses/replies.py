"""Responses over HTTP: as a stream of events, and as one object once they have ended."""

from __future__ import annotations

from abc import abstractmethod

from starlette.types import Receive, Scope, Send

from contracts.errors import ErrorBody
from contracts.reply import Reply
from contracts.stream_ids import START
from streaming_edge.sse import sse_body
from streaming_edge.terminal import terminal_error

from ..chat_span import ChatSpan
from ..http_errors import JsonResponse
from ..reply_reader import ReplyReader
from ..reply_responses import (
    POLL_SECONDS,
    ReplyResponse,
    ReplyServices,
    degraded_header,
    send_part,
    sse_start,
)
from ..request_times import ReplyFacts
from .events import ResponseEvents
from .ids import response_id_of
from .objects import ResponseFacts, response_of


class _ResponseReply(ReplyResponse):
    """What both have in common.

    Args:
        direct: the answer to the call that makes the response: what ends it before its first token is an
            error of that call.
    """

    path = "/v1/responses/"
    noun = "response"

    def __init__(
        self,
        services: ReplyServices,
        times: ReplyFacts,
        span: ChatSpan,
        facts: ResponseFacts,
        *,
        direct: bool,
    ) -> None:
        super().__init__(services, times, span, START)
        self._response = facts
        self.readable = facts.stored
        self._direct = direct

    def _where(self) -> str:
        return f"{response_id_of(self._response.request_id)}?{self._query()}"

    @abstractmethod
    def _query(self) -> str:
        """How the rest is asked for."""


class ResponseEventStream(_ResponseReply):
    """The events of a response (:mod:`producers.responses.events`)."""

    def __init__(
        self,
        services: ReplyServices,
        times: ReplyFacts,
        span: ChatSpan,
        events: ResponseEvents,
        *,
        direct: bool,
    ) -> None:
        super().__init__(services, times, span, events.facts, direct=direct)
        self._events = events

    def _query(self) -> str:
        seen = max(self._events.number, self._events.seen)
        return "stream=true" + (f"&starting_after={seen}" if seen >= 0 else "")

    async def _answer(self, reader: ReplyReader, scope: Scope, receive: Receive, send: Send) -> None:
        first = await self._first(reader) if self._direct else []
        error = self._ended_before_text(reader, first)
        if error is not None:
            await self._fail(error, scope, receive, send)
            return
        await sse_start(send, reader.facts.degraded)
        self._started = True
        if first:
            await send_part(send, self._events.encode(first), more=True)
        async for part in sse_body(reader, self._events, self._services.keepalive_seconds):
            await send_part(send, part, more=True)
        await send_part(send, b"", more=False)

    async def _fail_started(self, body: ErrorBody, send: Send) -> None:
        await send_part(send, self._events.error(body), more=False)


class WholeResponse(_ResponseReply):
    """A response as one object, once it has ended."""

    def _query(self) -> str:
        return "wait=true"

    async def _answer(self, reader: ReplyReader, scope: Scope, receive: Receive, send: Send) -> None:
        folded = Reply()
        while reader.terminal is None:
            folded.extend(await reader.next(POLL_SECONDS))
        terminal = folded.terminal or reader.terminal
        error = terminal_error(terminal)
        if error is not None and self._direct:
            await self._fail(error, scope, receive, send)
            return
        self._started = True
        shown = response_of(self._response, folded, terminal)
        await JsonResponse(shown, headers=degraded_header(reader.facts.degraded))(scope, receive, send)
