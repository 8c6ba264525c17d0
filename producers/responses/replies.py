"""Responses over HTTP: as a stream of events, and as one object once they have ended."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from starlette.types import Receive, Scope, Send

from contracts.entries import StreamEntry
from contracts.errors import ErrorBody, ErrorCode, error_body
from contracts.reply import Reply
from contracts.stream_ids import MODERATED, START
from streaming_edge.sse import sse_body
from streaming_edge.terminal import terminal_error

from ..chat_span import ChatSpan
from ..http_errors import JsonResponse, error_response
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
from .objects import Ending, ResponseFacts, ended_response

PATH: Final = "/v1/responses/"


class _ResponseReply(ReplyResponse):
    """What both have in common: where they are read on when the gateway stops.

    Args:
        direct: the answer to the call that makes the response: what ends it before its first token is an
            error of that call.
    """

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
        self._direct = direct

    async def _send_elsewhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As the base class does; a response that is not stored can be read on nowhere."""
        where = f"{response_id_of(self._response.request_id)}?{self._query()}"
        message = "The server is restarting; the response goes on."
        if self._response.stored:
            message += f" Read it with GET {PATH}{where}."
        body = error_body(ErrorCode.UNAVAILABLE, message)
        if self._started:
            await self._fail_started(body, send)
        elif not self._response.stored:
            await error_response(body, retry_after_seconds=1)(scope, receive, send)
        else:
            answer = JsonResponse({"error": body.model_dump()}, status_code=303)
            inside = scope["path"].startswith(PATH)
            answer.headers["location"] = where if inside else f"responses/{where}"
            await answer(scope, receive, send)

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
        first: list[StreamEntry] = []
        while self._direct and (not first or first[-1].id < MODERATED):
            first += await reader.next(POLL_SECONDS)
        if reader.terminal is not None and not Reply().extend(first).tokens_out:
            error = terminal_error(reader.terminal)
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
        text = folded.choices[0].text if 0 in folded.choices else ""
        facts = self._response
        if folded.accepted is not None:
            facts = facts.as_accepted(folded.accepted)
        shown = ended_response(facts, Ending.of(terminal), text, folded.usage)
        await JsonResponse(shown, headers=degraded_header(reader.facts.degraded))(scope, receive, send)

    async def _fail_started(self, body: ErrorBody, send: Send) -> None:
        """Nothing to add: the one message of the answer is out, or the client is gone."""
