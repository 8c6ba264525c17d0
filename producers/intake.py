"""The intake: from a validated body to a request that Kafka holds and a token stream shows.

Order of the effects, and why: the stream exists before the Kafka record, so that no stage ever meets a
request without one; a record that Kafka did not acknowledge seals the stream, so that no stream waits for a
request that nobody will run.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from redis.exceptions import RedisError

from contracts.entries import Accepted, Terminal
from contracts.errors import ApiError, ErrorCode, error_body
from contracts.identity import Principal, is_request_id, make_request_id, time_part
from contracts.keep import ReplyKind
from contracts.limits import Admission, RateLimits
from contracts.records import Message, RequestRecord
from contracts.stored_reply import StoredReply, reply_in_progress
from contracts.tiers import Status
from contracts.token_stream import StreamsUnavailable
from infra.kafka import Publisher, PublishError
from infra.settings import Settings
from infra.stored_replies_redis import StoredReplies
from infra.stream_redis import Owner, RedisTokenStreams
from infra.telemetry import ACCEPTED_REQUESTS, REFUSED_CALLS, trace_headers

from .chat_request import ChatRequest, counted_as, parse_chat_request, tier_of
from .conversation_context import ConversationContext
from .degradation import Degradation
from .idempotency import IdempotencyKeys, Once, once_of
from .limits import Limits
from .queue_depth import QueueDepth
from .request_times import unix_ms

log = logging.getLogger(__name__)

#: How long a submission waits for its turn in a crowd; then it is refused, before anything is done for it.
TURN_SECONDS: Final = 20.0
#: Where a kept reply is read.
_STORED_AT: Final[dict[ReplyKind, str]] = {
    "chat.completion": "/v1/chat/completions/chatcmpl-",
    "response": "/v1/responses/resp_",
}
#: Largest serialised request: below what the topics take, with room for key, headers and framing.
MAX_RECORD_BYTES: Final = 8 * 1024 * 1024 - 64 * 1024


@asynccontextmanager
async def _available() -> AsyncIterator[None]:
    """Turn a store that cannot be reached into what a client is told."""
    try:
        yield
    except StreamsUnavailable as error:
        raise unavailable() from error


def unavailable() -> ApiError:
    """Redis or Kafka cannot be reached: nothing was accepted, a later call may be."""
    return ApiError(
        ErrorCode.UNAVAILABLE,
        "The service cannot take requests right now; try again.",
        retry_after_seconds=1,
    )


def _no_such_request() -> ApiError:
    return ApiError(ErrorCode.NOT_FOUND, "There is no such request.")


class PipelineIntake:
    """Implements :class:`streaming_edge.protocols.Intake` for gateway and edge alike.

    What :meth:`submit` has begun it finishes in a task of its own, so a caller that is cancelled leaves
    either an accepted request or a sealed stream. Each step has the deadline of its Redis or Kafka call.
    """

    def __init__(
        self,
        settings: Settings,
        streams: RedisTokenStreams,
        publisher: Publisher,
        context: ConversationContext,
        depth: QueueDepth,
        keys: IdempotencyKeys,
        degradation: Degradation,
        limits: Limits,
        kept: StoredReplies,
        *,
        now_ms: Callable[[], int] = unix_ms,
    ) -> None:
        self._settings = settings
        self._streams = streams
        self._publisher = publisher
        self._context = context
        self._depth = depth
        self._keys = keys
        self._degradation = degradation
        self._limits = limits
        self._kept = kept
        self._now_ms = now_ms
        # A crowd waits here, in order, rather than for connections to Redis, of which there may be too few.
        self._turns = asyncio.Semaphore(max(1, settings.redis.max_connections // 2))
        self._submitting: set[asyncio.Task[Admission]] = set()

    def reconfigure(self, settings: Settings) -> None:
        """Go by these settings from the next request on."""
        self._settings = settings

    async def accept(
        self,
        principal: Principal,
        body: object,
        *,
        traceparent: str | None = None,
        idempotency_key: str | None = None,
    ) -> Admission:
        """See :class:`streaming_edge.protocols.Intake`. Counts refusals."""
        try:
            request = parse_chat_request(body, self._settings, principal)
            once = once_of(idempotency_key, body)
            return await self.submit(principal, request, traceparent=traceparent, once=once)
        except ApiError as error:
            REFUSED_CALLS.labels(error.code.value).inc()
            raise

    async def submit(
        self,
        principal: Principal,
        request: ChatRequest,
        *,
        traceparent: str | None = None,
        once: Once | None = None,
        request_id: str | None = None,
    ) -> Admission:
        """:meth:`accept` for a body that is validated already; does not count refusals.

        Args:
            request_id: of a request that whoever repeats it names again: a repeat changes nothing. None makes
                a new one.
        """
        principal = counted_as(self._settings, principal, request)
        task = asyncio.create_task(
            self._submit_in_turn(principal, request, traceparent, once, request_id)
        )
        self._submitting.add(task)
        task.add_done_callback(self._submitted)
        return await asyncio.shield(task)

    async def settle(self) -> None:
        """Wait for every submission that has begun; each is bounded by its own deadlines."""
        while self._submitting:
            await asyncio.wait(self._submitting)

    async def cancel(self, principal: Principal, request_id: str) -> None:
        """See :class:`streaming_edge.protocols.Intake`."""
        if await self._owner(principal, request_id) is None:
            raise _no_such_request()
        async with _available():
            await self._streams.seal(request_id, Terminal(status=Status.CANCELLED))

    async def authorize(self, principal: Principal, request_id: str) -> None:
        """See :class:`streaming_edge.protocols.Intake`."""
        owner = await self._owner(principal, request_id)
        async with _available():
            if owner is not None and (await self._streams.last_ids([request_id]))[0] is not None:
                return
            kept = await self._kept.get(principal.tenant, request_id)
        if owner is None and kept is None:
            raise _no_such_request()
        if kept is not None and kept.status is not None:
            where = f"its answer is stored: GET {_STORED_AT[kept.kind]}{time_part(request_id)}."
        elif owner is not None and owner.conversation_id is not None:
            where = f"its answer is stored in conversation '{owner.conversation_id}'."
        else:
            where = "it belonged to no conversation, so its answer is not stored."
        raise ApiError(ErrorCode.STREAM_EXPIRED, f"The stream of this request has expired; {where}")

    async def _owner(self, principal: Principal, request_id: str) -> Owner | None:
        if not is_request_id(request_id):
            return None
        async with _available():
            owner = await self._streams.owner(request_id)
        return owner if owner is not None and owner.tenant == principal.tenant else None

    def _submitted(self, task: asyncio.Task[Admission]) -> None:
        self._submitting.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it; a caller that left does not want it

    async def _submit_in_turn(
        self,
        principal: Principal,
        request: ChatRequest,
        traceparent: str | None,
        once: Once | None,
        request_id: str | None,
    ) -> Admission:
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            raise unavailable() from None
        try:
            return await self._submit_once(principal, request, traceparent, once, request_id)
        finally:
            self._turns.release()

    async def _submit_once(
        self,
        principal: Principal,
        request: ChatRequest,
        traceparent: str | None,
        once: Once | None,
        request_id: str | None,
    ) -> Admission:
        """Accept, unless a call with the same idempotency key was accepted before."""
        now_ms = self._now_ms()
        request_id = request_id or make_request_id(now_ms, secrets.token_bytes(10))
        if once is not None:
            async with _available():
                earlier = await self._keys.claim(principal.tenant, once, request_id)
            if earlier is not None:
                return Admission(earlier)
        try:
            rate_limits = await self._submit(principal, request, traceparent, request_id, now_ms)
        except BaseException:
            if once is not None:
                await self._forget(principal.tenant, once, request_id)
            raise
        return Admission(request_id, rate_limits)

    async def _forget(self, tenant: str, once: Once, request_id: str) -> None:
        try:
            await self._keys.release(tenant, once.key, request_id)
        except StreamsUnavailable:
            log.warning("idempotency key left behind", extra={"request_id": request_id})

    async def _submit(
        self,
        principal: Principal,
        request: ChatRequest,
        traceparent: str | None,
        request_id: str,
        now_ms: int,
    ) -> RateLimits | None:
        tier = tier_of(self._settings, principal)
        async with _available():
            await self._depth.check(tier.queue_class, self._settings.queue_limit(tier))
        conversation_id = request.conversation_id
        history: list[Message] = []
        if conversation_id is not None:
            async with _available():
                history = await self._context.claim(
                    principal.tenant, conversation_id, request_id, request.messages, now_ms
                )
        messages = [*request.before, *history, *request.messages]
        try:
            rate_limits = await self._limits.take(principal, request, messages, request_id)
            try:
                record = await self._record(principal, request, messages, request_id, now_ms)
                await self._hand_over(record, traceparent)
            except BaseException:
                if rate_limits is not None:
                    await self._give_back(request_id)
                raise
        except BaseException:
            if conversation_id is not None:
                await self._context.release(principal.tenant, conversation_id, request_id)
            raise
        ACCEPTED_REQUESTS.labels(principal.tier).inc()
        log.debug("accepted", extra={"request_id": request_id})
        return rate_limits

    async def _give_back(self, request_id: str) -> None:
        try:
            await self._limits.give_back(request_id)
        except StreamsUnavailable:
            log.warning("limits of a refused request left taken", extra={"request_id": request_id})

    async def _record(
        self,
        principal: Principal,
        request: ChatRequest,
        messages: list[Message],
        request_id: str,
        now_ms: int,
    ) -> RequestRecord:
        """The request as it is handed over, at its pool's step of the overload ladder."""
        async with _available():
            terms = await self._degradation.terms(principal, request, messages)
        return RequestRecord(
            request_id=request_id,
            tenant=principal.tenant,
            key_id=principal.key_id,
            tier=principal.tier,
            queue_class=tier_of(self._settings, principal).queue_class,
            model=terms.model,
            pool=terms.pool,
            created_ms=now_ms,
            deadline_ms=now_ms + int(terms.max_wait_seconds * 1000),
            conversation_id=request.conversation_id,
            turn=request.messages,
            leave_grace_ms=request.leave_grace_ms,
            degraded=terms.degraded,
            keep=request.keep,
            sampling=request.sampling,
            messages=messages,
            max_tokens_cap=terms.max_tokens_cap,
        )

    async def _hand_over(self, record: RequestRecord, traceparent: str | None) -> None:
        """Create the stream, then publish the record; without its record the stream is sealed."""
        value = record.encode()
        if len(value) > MAX_RECORD_BYTES:
            raise ApiError(
                ErrorCode.REQUEST_TOO_LARGE,
                f"The request with its conversation takes {len(value)} bytes; "
                f"at most {MAX_RECORD_BYTES} are possible.",
                param="messages",
            )
        reply = reply_in_progress(record)
        accepted = Accepted(
            tenant=record.tenant,
            key_id=record.key_id,
            tier=record.tier,
            model=record.model,
            created_ms=record.created_ms,
            deadline_ms=record.deadline_ms,
            conversation_id=record.conversation_id,
            traceparent=traceparent,
            choices=record.sampling.n,
            degraded=record.degraded,
        )
        try:
            if reply is not None:
                await self._kept.put(reply)
            await self._streams.create(record.request_id, accepted)
            await self._publisher.send(
                self._settings.kafka.topics.requests,
                value,
                key=record.request_id,
                headers=trace_headers(traceparent),
            )
        except (StreamsUnavailable, RedisError, PublishError) as error:
            # A command or record without an answer may have been applied: the seal makes that harmless.
            log.warning(
                "request not accepted",
                extra={"request_id": record.request_id, "error": type(error).__name__},
            )
            await self._seal_unavailable(record.request_id, reply)
            raise unavailable() from error

    async def _seal_unavailable(self, request_id: str, reply: StoredReply | None) -> None:
        error = error_body(ErrorCode.REQUEST_LOST, "The request could not be accepted.")
        try:
            await self._streams.seal(request_id, Terminal(status=Status.FAILED, error=error))
            if reply is not None:
                await self._kept.drop(request_id)
        except (StreamsUnavailable, RedisError) as failure:
            log.error(
                "stream of a refused request left open",
                extra={"request_id": request_id, "error": type(failure).__name__},
            )
