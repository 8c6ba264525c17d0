"""Replies over HTTP: as server-sent events and as one JSON object.

Both are plain ASGI: a reply costs one task that notices the client leaving, and one ``send`` a batch of
entries. The status line of a stream waits until the request is through moderation (``0-2``), so that what
can be known before the first token is a real status code.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from contracts.degraded import Degraded
from contracts.entries import StreamEntry, Text
from contracts.errors import ApiError, ErrorBody, ErrorCode, error_body
from contracts.stream_ids import MODERATED, START, StreamId
from contracts.token_stream import StreamsUnavailable
from streaming_edge.protocols import StreamHub
from streaming_edge.sse import SSE_HEADERS, ChatChunkEncoder, sse_body
from streaming_edge.terminal import terminal_error

from .chat_span import ChatSpan
from .completion import CompletionBuilder
from .http_errors import JsonResponse, error_response
from .intake import unavailable
from .protocols import Seals
from .replies import ClientLeft, GatewayLeaving, Replies
from .reply_reader import ReplyReader, read_reply
from .request_times import ReplyFacts

log = logging.getLogger(__name__)

DEGRADED_HEADER: Final = "x-headrace-degraded"
_SSE_HEADERS: Final = [(name.lower().encode(), value.encode()) for name, value in SSE_HEADERS.items()]
POLL_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class ReplyServices:
    """What answering needs."""

    hub: StreamHub
    streams: Seals
    replies: Replies
    keepalive_seconds: float


class ReplyResponse(Response):
    """Reads one reply for one client; ends ``span`` on every way out.

    Attributes:
        path: below which replies of this kind are read.
        noun: what clients are told that it is.
        readable: whether it can be read again.
    """

    path: ClassVar = "/v1/chat/completions/"
    noun: ClassVar = "reply"
    readable = True

    def __init__(
        self, services: ReplyServices, facts: ReplyFacts, span: ChatSpan, after: StreamId
    ) -> None:
        self.background = None
        self._services = services
        self._facts = facts
        self._span = span
        self._after = after
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the reply."""
        services = self._services
        try:
            async with read_reply(services.hub, services.streams, self._facts, self._after) as reader:
                async with services.replies.watch(receive):
                    await self._answer(reader, scope, receive, send)
                if reader.terminal is not None:
                    self._span.end_reply(reader.terminal)
        except ClientLeft:
            log.info("client left", extra={"request_id": self._facts.request_id})
            self._span.end("client_closed")
        except GatewayLeaving:
            await self._send_elsewhere(scope, receive, send)
            self._span.end("gateway_leaving")
        except (ApiError, StreamsUnavailable) as error:
            refusal = error if isinstance(error, ApiError) else unavailable()
            await self._fail(refusal.body, scope, receive, send)
            self._span.end(refusal.code.value, refusal.code.value if refusal.status >= 500 else None)
        except BaseException as error:
            self._span.end("error", type(error).__name__)
            raise

    async def _fail(self, body: ErrorBody, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell the client of an error: by status where that is still possible."""
        if self._started:
            await self._fail_started(body, send)
            return
        retry_after = 1 if body.status == 503 else None
        await error_response(body, retry_after_seconds=retry_after)(scope, receive, send)

    async def _send_elsewhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell the client where to read the reply, which goes on: by a redirect where that is still possible.

        The redirect is relative, so it holds behind a proxy too; clients that follow it wait there.
        """
        where = self._where()
        message = f"The server is restarting; the {self.noun} goes on."
        if self.readable:
            message += f" Read it with GET {self.path}{where}."
        body = error_body(ErrorCode.UNAVAILABLE, message)
        if self._started or not self.readable:
            await self._fail(body, scope, receive, send)
            return
        response = JsonResponse({"error": body.model_dump()}, status_code=303)
        inside = scope["path"].startswith(self.path)
        last = self.path.rstrip("/").rpartition("/")[2]
        response.headers["location"] = where if inside else f"{last}/{where}"
        await response(scope, receive, send)

    def _where(self) -> str:
        """What follows the endpoint's path to read the rest of this reply."""
        return self._facts.request_id

    async def _first(self, reader: ReplyReader) -> list[StreamEntry]:
        """Entries until the request is through moderation, or has ended."""
        entries: list[StreamEntry] = []
        position = self._after
        while position < MODERATED:
            entries += await reader.next(POLL_SECONDS)
            position = entries[-1].id if entries else position
        return entries

    @staticmethod
    def _ended_before_text(reader: ReplyReader, first: list[StreamEntry]) -> ErrorBody | None:
        """The error of a request that ended within its first entries, none of which is text."""
        if reader.terminal is None or any(isinstance(e.entry, Text) for e in first):
            return None
        return terminal_error(reader.terminal)

    @abstractmethod
    async def _answer(self, reader: ReplyReader, scope: Scope, receive: Receive, send: Send) -> None:
        """Read and send."""

    async def _fail_started(self, body: ErrorBody, send: Send) -> None:
        """End an answer whose status line is out with an error, where it is not of one piece."""


class EventStreamReply(ReplyResponse):
    """The reply as server-sent events (:mod:`streaming_edge.sse`)."""

    def __init__(
        self,
        services: ReplyServices,
        facts: ReplyFacts,
        span: ChatSpan,
        encoder: ChatChunkEncoder,
        after: StreamId = START,
        *,
        include_usage: bool = False,
    ) -> None:
        super().__init__(services, facts, span, after)
        self._encoder = encoder
        self._include_usage = include_usage

    def _where(self) -> str:
        offset = self._encoder.offset
        after = f"&after={offset}" if offset > START else ""
        usage = "&include_usage=true" if self._include_usage else ""
        return f"{self._facts.request_id}?stream=true{usage}{after}"

    async def _answer(self, reader: ReplyReader, scope: Scope, receive: Receive, send: Send) -> None:
        first = await self._first(reader)
        error = self._ended_before_text(reader, first)
        if error is not None and self._after < MODERATED:
            await self._fail(error, scope, receive, send)
            return
        await sse_start(send, reader.facts.degraded)
        self._started = True
        if first:
            await send_part(send, self._encoder.encode(first), more=not reader.ended)
        if reader.ended:
            return
        async for part in sse_body(reader, self._encoder, self._services.keepalive_seconds):
            await send_part(send, part, more=not reader.ended)
        if not reader.ended:
            await send_part(send, b"", more=False)

    async def _fail_started(self, body: ErrorBody, send: Send) -> None:
        await send_part(send, self._encoder.error(body), more=False)


class WholeReply(ReplyResponse):
    """The reply as one ``chat.completion`` object, once it is complete."""

    def __init__(
        self,
        services: ReplyServices,
        facts: ReplyFacts,
        span: ChatSpan,
        more: Mapping[str, object] | None = None,
    ) -> None:
        """Prepare; ``more`` are fields that the object has beyond those of a completion."""
        super().__init__(services, facts, span, START)
        self._more = more or {}

    async def _answer(self, reader: ReplyReader, scope: Scope, receive: Receive, send: Send) -> None:
        builder = CompletionBuilder()
        while reader.terminal is None:
            builder.extend(await reader.next(POLL_SECONDS))
        error = terminal_error(reader.terminal)
        if error is not None:
            await self._fail(error, scope, receive, send)
            return
        self._started = True
        headers = degraded_header(reader.facts.degraded)
        completion = builder.completion(reader.facts) | dict(self._more)
        await JsonResponse(completion, headers=headers)(scope, receive, send)


def degraded_header(degraded: Degraded | None) -> dict[str, str]:
    """``x-headrace-degraded`` with the step of the overload ladder, where the reply is less for it."""
    return {DEGRADED_HEADER: degraded.step} if degraded is not None else {}


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def sse_start(send: Send, degraded: Degraded | None) -> None:
    """Begin an answer of server-sent events."""
    headers = [*_SSE_HEADERS, *_raw(degraded_header(degraded))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_part(send: Send, part: bytes, *, more: bool) -> None:
    """Send a part of the body of an answer that has begun."""
    await send({"type": "http.response.body", "body": part, "more_body": more})
