"""The moderation stage on a real broker and Redis."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from contracts.entries import Dispatched, Moderated, Started, StreamEntry, Terminal
from contracts.records import DeadLetterRecord, OutcomeRecord, QueuedRecord, Sampling, decode
from contracts.sim_tokens import sim_token_ids
from contracts.stream_ids import DISPATCHED, MODERATED, StreamId
from contracts.tiers import QueueClass, Status
from infra.telemetry import traceparent_from
from stages.moderation_faust import ModerationRole

from .stage_bench import MODEL, Bench, now_ms, request_record, running, stage_settings, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 8_192


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(kafka: str, redis_server: str) -> AsyncIterator[Bench]:
    settings = stage_settings(
        kafka, redis_server, 901, moderation={"blocked_patterns": ["forbidden fruit"]}
    )
    async with Bench(settings) as made, running(ModerationRole(settings)):
        yield made


async def send(bench: Bench, record: Any, *, accept: bool = True) -> str:
    if accept:
        await bench.accepted(record)
    await bench.publisher.send(bench.topics.requests, record.encode(), key=record.request_id)
    return str(record.request_id)


async def queued(bench: Bench, request_id: str) -> QueuedRecord:
    [record] = await until(lambda: bench.queue.of(request_id), f"{request_id} queued")
    return decode(QueuedRecord, record.value)


async def outcome(bench: Bench, request_id: str) -> OutcomeRecord:
    record = await until(lambda: bench.outcomes.of(request_id), f"outcome of {request_id}")
    return decode(OutcomeRecord, record[0].value)


async def still_serves(bench: Bench) -> None:
    """Every partition still moves: enough requests that each gets some."""
    for _ in range(12):
        await queued(bench, await send(bench, request_record()))


@pytest.mark.parametrize("queue_class", list(QueueClass))
async def test_a_request_goes_tokenized_into_the_queue_of_its_class(
    bench: Bench, queue_class: QueueClass
) -> None:
    record = request_record("What is the capital of France?", queue_class=queue_class)
    await send(bench, record)
    made = await queued(bench, record.request_id)
    assert made.prompt_token_ids == sim_token_ids("user: What is the capital of France?\nassistant:")
    assert made.sampling.max_tokens == 8
    assert made.turn == record.turn
    [kept] = bench.queue.of(record.request_id)
    assert kept.topic == bench.topics.queue(queue_class)
    entries = await bench.streams.read_all(record.request_id)
    assert entries[1:] == [StreamEntry(MODERATED, Moderated(prompt_tokens=len(made.prompt_token_ids)))]


async def test_p2_the_trace_context_goes_on_with_the_record(bench: Bench) -> None:
    record = request_record()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await bench.accepted(record)
    await bench.publisher.send(
        bench.topics.requests,
        record.encode(),
        key=record.request_id,
        headers=[("traceparent", trace.encode())],
    )
    await queued(bench, record.request_id)
    [kept] = bench.queue.of(record.request_id)
    assert (traceparent_from(kept.headers) or "").split("-")[1] == trace.split("-")[1]


@pytest.mark.parametrize("text", ["a FORBIDDEN fruit", "I will kill you"])
async def test_a_refused_message_ends_as_content_filter(bench: Bench, text: str) -> None:
    request_id = await send(bench, request_record(text))
    terminal = (await bench.sealed(request_id)).terminal
    assert terminal is not None
    assert terminal.error is not None
    assert (terminal.status, terminal.error.code) == (Status.REFUSED, "content_filter")
    made = await outcome(bench, request_id)
    assert (made.status, made.choices) == (Status.REFUSED, [])
    assert not bench.queue.of(request_id)


async def test_c8_a_prompt_over_the_context_ends_with_true_numbers(bench: Bench) -> None:
    request_id = await send(bench, request_record("word " * CONTEXT))
    terminal = (await bench.sealed(request_id)).terminal
    assert terminal is not None
    assert terminal.error is not None
    assert terminal.error.code == "context_length_exceeded"
    tokens = len(sim_token_ids("user: " + "word " * CONTEXT + "\nassistant:"))
    assert f"{CONTEXT} tokens" in terminal.error.message
    assert f"{tokens} tokens" in terminal.error.message
    assert not bench.queue.of(request_id)


async def test_max_tokens_is_resolved(bench: Bench) -> None:
    request_id = await send(bench, request_record(sampling=Sampling()))
    assert (await queued(bench, request_id)).sampling.max_tokens == 512


async def test_d5_a_request_past_its_deadline_is_expired(bench: Bench) -> None:
    request_id = await send(bench, request_record(deadline_ms=now_ms() - 1))
    terminal = (await bench.sealed(request_id)).terminal
    assert terminal is not None
    assert terminal.status is Status.EXPIRED
    assert (await outcome(bench, request_id)).status is Status.EXPIRED
    assert not bench.queue.of(request_id)


async def test_d5_a_cancelled_request_is_not_queued_and_has_an_outcome(bench: Bench) -> None:
    record = request_record()
    await bench.accepted(record)
    await bench.streams.seal(record.request_id, Terminal(status=Status.CANCELLED))
    await send(bench, record, accept=False)
    assert (await outcome(bench, record.request_id)).status is Status.CANCELLED
    await still_serves(bench)
    assert not bench.queue.of(record.request_id)


async def test_a_lost_stream_has_a_failed_outcome(bench: Bench) -> None:
    request_id = await send(bench, request_record(), accept=False)
    made = await outcome(bench, request_id)
    assert made.status is Status.FAILED
    assert made.error is not None
    assert made.error.code == "stream_lost"
    assert not bench.queue.of(request_id)


async def test_g2_a_redelivered_request_is_queued_again_but_not_once_it_is_beyond(bench: Bench) -> None:
    record = request_record()
    await send(bench, record)
    await queued(bench, record.request_id)
    await send(bench, record, accept=False)
    await until(lambda: len(bench.queue.of(record.request_id)) == 2, "queued again")
    await bench.streams.append(
        [
            (record.request_id, DISPATCHED, Dispatched(worker_id="w")),
            (record.request_id, StreamId(1, 0), Started(worker_id="w", model_revision="1")),
        ]
    )
    await send(bench, record, accept=False)
    late = record.model_copy(update={"deadline_ms": now_ms() - 1})
    await send(bench, late, accept=False)
    await still_serves(bench)
    assert len(bench.queue.of(record.request_id)) == 2
    assert (await bench.reply(record.request_id)).terminal is None, "a redelivery must not end it"


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


POISON = {
    "not json": b"not json",
    "half an object": b"{",
    "no UTF-8": b"\xff",
    "a list": b"[]",
    "null": b"null",
    "a string": b'"str"',
    "900 levels": nested(900),
    "900 levels of objects": b'{"a":' * 900 + b"1" + b"}" * 900,
    "no request id": json.dumps({"schema_version": 1, "tenant": "t"}).encode(),
    "a foreign request id": json.dumps({"request_id": "../../etc"}).encode(),
    "empty": b"",
}


@pytest.mark.parametrize("name", POISON)
async def test_g5_a_poison_record_is_dead_lettered_and_the_next_one_served(
    bench: Bench, name: str
) -> None:
    before = len(bench.deadletter.records)
    await bench.publisher.send(bench.topics.requests, POISON[name], partition=0)
    await until(lambda: len(bench.deadletter.records) > before, "dead letter")
    letter = DeadLetterRecord.model_validate_json(bench.deadletter.records[before].value)
    assert (letter.topic, letter.partition, letter.stage) == (bench.topics.requests, 0, "moderation")
    assert letter.reason in {"malformed", "invalid"}
    await still_serves(bench)


async def poisoned(bench: Bench, **changes: Any) -> DeadLetterRecord:
    """Send a record with changed fields; its dead letter, after its client has an error."""
    record = request_record()
    await bench.accepted(record)
    value = json.dumps(record.model_dump(mode="json") | changes).encode()
    await bench.publisher.send(bench.topics.requests, value, key=record.request_id)
    terminal = (await bench.sealed(record.request_id)).terminal
    assert terminal is not None
    assert terminal.error is not None
    assert (terminal.status, terminal.error.code) == (Status.FAILED, "bad_record")
    assert (await outcome(bench, record.request_id)).status is Status.FAILED
    [letter] = await until(lambda: bench.deadletter.of(record.request_id), "dead letter")
    return DeadLetterRecord.model_validate_json(letter.value)


async def test_g5_g16_a_newer_schema_is_dead_lettered_and_its_client_told(bench: Bench) -> None:
    assert (await poisoned(bench, schema_version=2)).reason == "newer_schema"


@pytest.mark.parametrize("changes", [{"queue_class": "vip"}, {"messages": "str"}, {"sampling": None}])
async def test_g16_an_unknown_value_is_dead_lettered_and_its_client_told(
    bench: Bench, changes: dict[str, Any]
) -> None:
    assert (await poisoned(bench, **changes)).reason == "invalid"


async def test_g16_an_unknown_field_is_ignored(bench: Bench) -> None:
    record = request_record()
    await bench.accepted(record)
    value = json.dumps(record.model_dump(mode="json") | {"novelty": {"a": 1}}).encode()
    await bench.publisher.send(bench.topics.requests, value, key=record.request_id)
    assert (await queued(bench, record.request_id)).model == MODEL


async def test_g7_a_bug_in_handling_sets_the_record_aside_and_the_stage_lives(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages import moderation_faust

    make = moderation_faust.queued_record

    def broken(request: Any, *rest: Any) -> QueuedRecord:
        if request.tenant == "bug":
            raise TypeError("a bug")
        return make(request, *rest)

    monkeypatch.setattr(moderation_faust, "queued_record", broken)
    request_id = await send(bench, request_record(tenant="bug"))
    terminal = (await bench.sealed(request_id)).terminal
    assert terminal is not None
    assert terminal.error is not None
    assert terminal.error.code == "internal_error"
    assert (await outcome(bench, request_id)).status is Status.FAILED
    [letter] = bench.deadletter.of(request_id)
    assert DeadLetterRecord.model_validate_json(letter.value).reason == "handler_error"
    await still_serves(bench)


async def test_g2_g13_a_killed_stage_repeats_but_never_skips(kafka: str, redis_server: str) -> None:
    settings = stage_settings(kafka, redis_server, 902)
    async with Bench(settings) as bench:
        records = [request_record(f"question {i}") for i in range(40)]
        async with running(ModerationRole(settings), drain=False):
            for record in records[:20]:
                await send(bench, record)
            await until(lambda: bench.queue.records, "something queued")
        for record in records[20:]:
            await send(bench, record)
        async with running(ModerationRole(settings)):
            for record in records:
                found = await until(lambda r=record: bench.queue.of(r.request_id), "queued")
                assert {decode(QueuedRecord, r.value).request_id for r in found} == {record.request_id}
