"""The Responses API through the official client: create, read, resume, continue, cancel, delete."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from redis import Redis as SyncRedis

from contracts.outcome import make_outcome
from contracts.reply import Reply
from contracts.stored_reply import ended_reply
from infra.settings import DEV_FREE_KEY, DEV_PAID_KEY, Settings
from infra.stored_replies_redis import StoredReplies
from infra.stream_redis import RedisTokenStreams, connect, stream_key
from tests.integration.gateway_fixture import Gateway, gateway_in_a_thread
from tests.stack_process import eventually

UNKNOWN = "resp_" + "0" * 32


def play(**parts: Any) -> str:
    """Input whose reply is scripted."""
    return json.dumps(parts)


@pytest.fixture(scope="module")
def config(module_settings: Callable[..., Settings]) -> Settings:
    return module_settings()


@pytest.fixture(scope="module")
def gateway(config: Settings) -> Iterator[Gateway]:
    with gateway_in_a_thread(config) as running:
        yield running


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=DEV_PAID_KEY, max_retries=0, timeout=20)


@pytest.fixture(scope="module")
def stranger(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=DEV_FREE_KEY, max_retries=0, timeout=20)


def request_of(response_id: str) -> str:
    return f"chatcmpl-{response_id.removeprefix('resp_')}"


def history(config: Settings, gateway: Gateway, response_id: str, *, expire: bool) -> None:
    """The outcome reaches the store, and the stream may reach the end of its retention."""
    request_id = request_of(response_id)

    async def store() -> None:
        redis = connect(config.redis)
        streams = RedisTokenStreams(redis, config.streams)
        record = gateway.double.records[request_id]
        reply = Reply().extend(await streams.read_all(request_id))
        kept = ended_reply(make_outcome(record, reply, now_ms=record.created_ms + 1_000))
        assert kept is not None
        await StoredReplies(redis, config.stored).put(kept)
        await redis.aclose()

    asyncio.run(store())
    if expire:
        with SyncRedis.from_url(config.redis.url) as redis:
            redis.delete(stream_key(request_id))


def ended(client: openai.OpenAI, response_id: str) -> Response:
    """A background response once it has ended."""
    eventually(
        lambda: client.responses.retrieve(response_id).status not in ("queued", "in_progress"),
        10,
        "the response has ended",
    )
    return client.responses.retrieve(response_id)


def test_a_response_and_its_store(config: Settings, gateway: Gateway, client: openai.OpenAI) -> None:
    made = client.responses.create(
        model="default",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": play(tokens=["Hi", " you"])}]}
        ],
        instructions="Be brief.",
        metadata={"a": "b"},
        max_output_tokens=9,
        temperature=0.5,
        text={"format": {"type": "text"}},
    )
    assert (made.status, made.output_text, made.metadata) == ("completed", "Hi you", {"a": "b"})
    assert made.usage is not None
    assert made.usage.total_tokens == 9
    record = gateway.double.records[request_of(made.id)]
    assert (record.messages[0].role, record.messages[0].content) == ("system", "Be brief.")
    assert len(record.turn) == 1
    assert record.sampling.max_tokens == 9
    from_stream = client.responses.retrieve(made.id)
    history(config, gateway, made.id, expire=True)
    from_store = client.responses.retrieve(made.id)
    assert from_store.output == from_stream.output == made.output
    assert from_store.completed_at is not None
    items = client.responses.input_items.list(made.id).data
    assert [item.type for item in items] == ["message"]
    with pytest.raises(openai.APIStatusError) as gone:
        client.responses.retrieve(made.id, stream=True)
    assert (gone.value.status_code, gone.value.code) == (410, "stream_expired")
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_events_and_every_resume_of_them_E4(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="default", input=play(tokens=["a", "b", "c"]), stream=True)
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    first = events[0]
    assert first.type == "response.created"
    response_id = first.response.id
    for seen in (0, 3, 5, len(events) - 1, len(events) + 9):
        rest = client.responses.retrieve(response_id, stream=True, starting_after=seen)
        assert list(rest) == events[seen + 1 :]
    assert list(client.responses.retrieve(response_id, stream=True)) == events


def test_one_in_the_background_is_followed_and_cancelled_once(
    gateway: Gateway, client: openai.OpenAI
) -> None:
    gateway.double.hold()
    made = client.responses.create(
        model="default", input=play(tokens=["x", "y"], hold_before=1), background=True
    )
    assert (made.status, made.background, made.output) == ("queued", True, [])
    for _ in range(2):
        assert client.responses.cancel(made.id).status == "cancelled"
    assert ended(client, made.id).status == "cancelled"
    gateway.double.release()
    done = client.responses.create(model="default", input=play(tokens=["x"]), background=True)
    assert ended(client, done.id).output_text == "x"
    assert client.responses.cancel(done.id).status == "completed"


def test_a_background_stream_is_queued_first_and_survives_its_reader_F1(
    gateway: Gateway, client: openai.OpenAI
) -> None:
    gateway.double.hold()
    script = play(tokens=["x", "y", "z"], hold_before=2)
    stream = client.responses.create(model="default", input=script, background=True, stream=True)
    seen = [next(stream) for _ in range(6)]
    assert [event.type for event in seen[:3]] == [
        *("response.created", "response.queued", "response.in_progress")
    ]
    response_id = seen[0].response.id  # type: ignore[union-attr]
    stream.close()
    gateway.double.release()
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=5))
    deltas = [e.delta for e in [*seen, *rest] if e.type == "response.output_text.delta"]
    assert "".join(deltas) == ended(client, response_id).output_text == "xyz"


def test_a_response_goes_on_after_the_one_before_without_its_instructions_E11(
    gateway: Gateway, client: openai.OpenAI
) -> None:
    first = client.responses.create(
        model="default", input=play(tokens=["one"]), instructions="Only the first time."
    )
    second = client.responses.create(
        model="default", input=play(tokens=["two"]), previous_response_id=first.id
    )
    third = client.responses.create(
        model="default", input=play(tokens=["three"]), previous_response_id=second.id
    )
    record = gateway.double.records[request_of(third.id)]
    assert [m.role for m in record.messages] == ["user", "assistant"] * 2 + ["user"]
    assert [m.content for m in record.messages if m.role == "assistant"] == ["one", "two"]
    assert len(record.turn) == 1


def test_a_response_is_part_of_a_conversation_E11(gateway: Gateway, client: openai.OpenAI) -> None:
    conversation = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "My name is Ada."}]
    )
    made = client.responses.create(
        model="default", input=play(tokens=["Hi"]), conversation=conversation.id, instructions="Brief."
    )
    assert made.conversation is not None
    assert made.conversation.id == conversation.id
    record = gateway.double.records[request_of(made.id)]
    assert [m.role for m in record.messages] == ["system", "user", "user"]
    items = client.conversations.items.list(conversation.id, order="asc").data
    assert [item.id for item in items][-1] == made.output[0].id


def test_another_tenant_s_response_is_no_response_B8(
    client: openai.OpenAI, stranger: openai.OpenAI
) -> None:
    made = client.responses.create(model="default", input="hello", background=True)
    answers = []
    for response_id in (made.id, UNKNOWN, "resp_x"):
        calls: list[Callable[[str], object]] = [
            stranger.responses.retrieve,
            stranger.responses.cancel,
            stranger.responses.delete,
            stranger.responses.input_items.list,
            lambda i: stranger.responses.retrieve(i, stream=True),
            lambda i: stranger.responses.create(model="default", input="x", previous_response_id=i),
        ]
        for call in calls[: None if response_id != "resp_x" else -1]:
            with pytest.raises(openai.NotFoundError) as refused:
                call(response_id)
            answers.append(refused.value.body)
    assert len({str(answer) for answer in answers}) == 2  # one of them names a field
    ended(client, made.id)


def test_what_ends_it_before_its_first_token_is_an_error_of_the_call_C5(client: openai.OpenAI) -> None:
    refusing = play(refuse="content_filter")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="default", input=refusing, stream=stream)
        assert refused.value.code == "content_filter"
    made = client.responses.create(model="default", input=refusing, background=True)
    response = ended(client, made.id)
    assert response.status == "failed"
    assert response.error is not None
    assert response.error.code == "content_filter"
    events = list(client.responses.retrieve(made.id, stream=True))
    assert [event.type for event in events][-1] == "response.failed"


def test_without_store_nothing_is_kept(client: openai.OpenAI) -> None:
    made = client.responses.create(model="default", input="hello", store=False)
    assert made.status == "completed"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "role": "user"}]}, "input[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**8}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"previous_response_id": UNKNOWN, "conversation": "conv_1"}, "previous_response_id"),
        ({"conversation": 7}, "conversation"),
        ({"instructions": 5}, "instructions"),
        ({"model": 5}, "model"),
        ({"top_k": -7}, "top_k"),
        ({"metadata": {"a": 5}}, "metadata"),
    ],
)
def test_a_field_that_cannot_be_used_is_named_C5(
    gateway: Gateway, body: dict[str, Any], param: str
) -> None:
    content = json.dumps({"model": "default", "input": "x"} | body)
    headers = {"Authorization": f"Bearer {DEV_PAID_KEY}", "Content-Type": "application/json"}
    answer = httpx.post(f"{gateway.url}/v1/responses", content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
