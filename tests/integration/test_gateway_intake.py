"""The intake on a real Redis: what is left behind when a step fails, and conversations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from contracts.entries import Accepted, Moderated, Started, Terminal, Text
from contracts.errors import ApiError, ErrorCode
from contracts.identity import Principal, make_request_id
from contracts.outcome import make_outcome
from contracts.records import Message, RequestRecord, decode
from contracts.reply import Reply
from contracts.stream_ids import MODERATED, StreamId
from contracts.tiers import FinishReason, Status
from contracts.token_stream import Appended
from infra.conversations_redis import Conversations
from infra.kafka import Publisher, PublishError
from infra.limits_redis import LimitCounters
from infra.settings import Settings
from infra.stored_replies_redis import StoredReplies
from infra.stream_redis import RedisTokenStreams, connect
from producers.conversation_context import ConversationContext
from producers.degradation import Degradation
from producers.idempotency import IdempotencyKeys
from producers.intake import MAX_RECORD_BYTES, PipelineIntake
from producers.limits import Limits
from producers.queue_depth import QueueDepth
from producers.request_times import unix_ms

PAID = Principal(key_id="dev", tenant="dev", tier="paid")
OTHER = Principal(key_id="other", tenant="other", tier="paid")


class FakePublisher(Publisher):
    """Keeps what is sent; fails or waits when told to."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.kafka)
        self.sent: list[RequestRecord] = []
        self.failing = False
        self.gate: asyncio.Event | None = None
        self.waiting = asyncio.Event()

    async def send(self, topic: str, value: bytes, **kwargs: Any) -> None:
        record = decode(RequestRecord, value)
        self.last = record
        if self.gate is not None:
            self.waiting.set()
            await self.gate.wait()
        if self.failing:
            raise PublishError("no broker")
        self.sent.append(record)


class Parts:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.client = connect(settings.redis)
        self.streams = RedisTokenStreams(self.client, settings.streams)
        self.conversations = Conversations(self.client, settings.history)
        self.publisher = FakePublisher(settings)
        self.now_ms = unix_ms()
        self.intake = PipelineIntake(
            settings,
            self.streams,
            self.publisher,
            ConversationContext(settings, self.streams, self.conversations),
            QueueDepth(self.client),
            IdempotencyKeys(self.client, self.streams, lambda: self.now_ms),
            Degradation(self.client, settings),
            Limits(LimitCounters(self.client, 5.0), self.streams, settings, lambda: self.now_ms),
            StoredReplies(self.client, settings.stored),
            now_ms=lambda: self.now_ms,
        )

    async def say(self, text: str, principal: Principal = PAID, **fields: Any) -> RequestRecord:
        body = {"model": "default", "messages": [{"role": "user", "content": text}], **fields}
        request_id = (await self.intake.accept(principal, body)).request_id
        assert self.publisher.sent[-1].request_id == request_id
        return self.publisher.sent[-1]

    async def talk(self, text: str, principal: Principal = PAID) -> RequestRecord:
        self.now_ms += 1
        return await self.say(text, principal, conversation_id="c")

    async def reply(self, record: RequestRecord, text: str) -> None:
        rid = record.request_id
        await self.streams.append(
            [
                (rid, MODERATED, Moderated(prompt_tokens=1)),
                (rid, StreamId(1, 0), Started(worker_id="w", model_revision="1")),
                (rid, StreamId(1, 1), Text(text, (1,))),
            ]
        )

    async def complete(self, record: RequestRecord, text: str) -> None:
        await self.reply(record, text)
        terminal = Terminal(status=Status.COMPLETED, finish_reasons=[FinishReason.STOP])
        await self.streams.seal(record.request_id, terminal)

    async def terminal(self, request_id: str) -> Terminal | None:
        return Reply().extend(await self.streams.read_all(request_id)).terminal


@pytest.fixture
async def parts(settings: Callable[..., Settings]) -> AsyncIterator[Parts]:
    made = Parts(settings(kafka={"bootstrap": "127.0.0.1:1"}))
    yield made
    await made.intake.settle()
    await made.client.aclose()


def texts(record: RequestRecord) -> list[str]:
    return [m.content for m in record.messages]


async def test_an_accepted_request_has_a_stream_and_a_record(parts: Parts) -> None:
    record = await parts.say("hi", max_tokens=5)
    first = (await parts.streams.read_all(record.request_id))[0].entry
    assert isinstance(first, Accepted)
    assert (first.tenant, first.tier, first.model) == ("dev", "paid", "headrace-sim")
    assert record.created_ms == first.created_ms == parts.now_ms
    assert record.deadline_ms - record.created_ms == 60_000
    assert record.sampling.max_tokens == 5
    assert record.turn == record.messages


async def test_a_record_kafka_refuses_leaves_a_sealed_stream(parts: Parts) -> None:
    parts.publisher.failing = True
    with pytest.raises(ApiError) as raised:
        await parts.say("hi", conversation_id="c")
    assert (raised.value.status, raised.value.retry_after_seconds) == (503, 1)
    terminal = await parts.terminal(parts.publisher.last.request_id)
    assert terminal is not None
    assert terminal.status is Status.FAILED
    assert await parts.conversations.load("dev", "c") == ([], {})
    parts.publisher.failing = False
    assert texts(await parts.talk("again")) == ["again"]


@pytest.mark.parametrize("failing", [False, True])
async def test_a_caller_that_is_cancelled_leaves_an_accepted_or_a_sealed_request(
    parts: Parts, failing: bool
) -> None:
    parts.publisher.gate = asyncio.Event()
    parts.publisher.failing = failing
    accepting = asyncio.create_task(parts.say("hi"))
    await parts.publisher.waiting.wait()
    accepting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await accepting
    parts.publisher.gate.set()
    await parts.intake.settle()
    terminal = await parts.terminal(parts.publisher.last.request_id)
    assert (terminal is not None) is failing
    assert bool(parts.publisher.sent) is not failing


async def test_redis_down_is_503_and_nothing_is_sent(settings: Callable[..., Settings]) -> None:
    parts = Parts(settings(redis={"url": "redis://127.0.0.1:1/0", "timeout_seconds": 0.2}))
    for conversation in (None, "c"):
        with pytest.raises(ApiError) as raised:
            await parts.say("hi", conversation_id=conversation)
        assert raised.value.status == 503
    assert not parts.publisher.sent
    await parts.client.aclose()


async def test_g11_the_serialised_size_decides(parts: Parts) -> None:
    big = "x" * (MAX_RECORD_BYTES // 2)
    with pytest.raises(ApiError) as raised:
        await parts.say(big, conversation_id="c")
    assert raised.value.status == 413
    assert await parts.conversations.load("dev", "c") == ([], {})
    assert not parts.publisher.sent


async def test_a_conversation_goes_on_from_the_stream_before_history_has_it(parts: Parts) -> None:
    first = await parts.talk("one")
    with pytest.raises(ApiError) as busy:
        await parts.talk("too early")
    assert busy.value.code is ErrorCode.CONVERSATION_BUSY
    await parts.complete(first, "eins")
    second = await parts.talk("two")
    assert texts(second) == ["one", "eins", "two"]
    assert [m.content for m in second.turn] == ["two"]
    await parts.complete(second, "zwei")
    reply = Reply().extend(await parts.streams.read_all(first.request_id))
    await parts.conversations.store(make_outcome(first, reply, now_ms=1))
    assert texts(await parts.talk("three")) == ["one", "eins", "two", "zwei", "three"]


async def test_conversations_of_two_tenants_are_two(parts: Parts) -> None:
    await parts.complete(await parts.talk("secret"), "x")
    assert texts(await parts.talk("hi", OTHER)) == ["hi"]


async def test_d2_a_cancelled_turn_is_seen_with_what_was_out(parts: Parts) -> None:
    first = await parts.talk("one")
    await parts.reply(first, "part")
    await parts.intake.cancel(PAID, first.request_id)
    late = (first.request_id, StreamId(1, 2), Text(" grown later", (2,)))
    assert await parts.streams.append([late]) == [Appended.SEALED]
    second = await parts.talk("two")
    assert texts(second) == ["one", "part", "two"]
    await parts.complete(second, "zwei")
    assert texts(await parts.talk("three")) == ["one", "part", "two", "zwei", "three"]


async def test_d2_a_turn_that_still_runs_is_told_and_not_mixed_in(parts: Parts) -> None:
    """Its client has left without a word: until its grace time is over it is busy, as documented."""
    first = await parts.talk("one")
    await parts.reply(first, "part")
    with pytest.raises(ApiError) as busy:
        await parts.talk("two")
    assert (busy.value.status, busy.value.code) == (409, ErrorCode.CONVERSATION_BUSY)
    await parts.intake.cancel(PAID, first.request_id)
    assert texts(await parts.talk("two")) == ["one", "part", "two"]


async def test_b8_a_failed_turn_is_no_part_of_the_conversation(parts: Parts) -> None:
    first = await parts.talk("one")
    await parts.reply(first, "half")
    await parts.streams.seal(first.request_id, Terminal(status=Status.FAILED))
    assert texts(await parts.talk("two")) == ["two"]


async def test_i5_a_request_nothing_ever_started_blocks_only_until_its_deadline(parts: Parts) -> None:
    first = await parts.talk("one")
    parts.now_ms += 59_000
    with pytest.raises(ApiError):
        await parts.talk("two")
    parts.now_ms += 2_000
    assert texts(await parts.talk("three")) == ["three"]
    terminal = await parts.terminal(first.request_id)
    assert terminal is not None
    assert terminal.status is Status.EXPIRED


async def test_i5_a_note_without_a_stream_blocks_only_while_it_may_be_accepted(parts: Parts) -> None:
    dead = make_request_id(parts.now_ms, b"0" * 10)
    await parts.conversations.add_pending("dev", "c", dead, [Message(role="user", content="lost")])
    with pytest.raises(ApiError) as busy:
        await parts.talk("one")
    assert busy.value.status == 409
    parts.now_ms += 31_000
    assert texts(await parts.talk("two")) == ["two"]


async def test_of_simultaneous_turns_at_most_one_runs(parts: Parts) -> None:
    results = await asyncio.gather(*(parts.talk(str(k)) for k in range(8)), return_exceptions=True)
    assert len(parts.publisher.sent) <= 1
    refused = [r for r in results if isinstance(r, BaseException)]
    assert len(refused) + len(parts.publisher.sent) == 8
    assert all(isinstance(r, ApiError) and r.status == 409 for r in refused)


async def test_cancel_and_authorize_know_owners_only(parts: Parts) -> None:
    record = await parts.say("hi")
    for call in (parts.intake.cancel, parts.intake.authorize):
        for principal, name in ((OTHER, record.request_id), (PAID, "x"), (PAID, "chatcmpl-" + "0" * 32)):
            with pytest.raises(ApiError) as raised:
                await call(principal, name)
            assert raised.value.code is ErrorCode.NOT_FOUND
    await parts.intake.authorize(PAID, record.request_id)
    await parts.intake.cancel(PAID, record.request_id)
    await parts.intake.cancel(PAID, record.request_id)
    terminal = await parts.terminal(record.request_id)
    assert terminal is not None
    assert (terminal.status, terminal.error) == (Status.CANCELLED, None)


async def test_j7_a_full_class_is_refused_and_others_are_not(parts: Parts) -> None:
    limit = parts.settings.scheduler.queue_limit
    await parts.client.hset("hr:queue:depth", mapping={"interactive": limit, "standard": limit - 1})
    with pytest.raises(ApiError) as raised:
        await parts.say("hi")
    assert raised.value.code is ErrorCode.QUEUE_FULL
    assert raised.value.retry_after_seconds is not None
    await parts.say("hi", Principal(key_id="free", tenant="dev-free", tier="free"))
