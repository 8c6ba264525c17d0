"""Kept chat completions through the official client: while they run, from the stream, from the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from redis import Redis as SyncRedis

from contracts.outcome import make_outcome
from contracts.reply import Reply
from contracts.stored_reply import ended_reply
from infra.settings import DEV_FREE_KEY, DEV_PAID_KEY, Settings
from infra.stored_replies_redis import StoredReplies
from infra.stream_redis import RedisTokenStreams, connect, stream_key
from tests.integration.gateway_fixture import Gateway, gateway_in_a_thread
from tests.integration.pipeline_double import script
from tests.stack_process import StackProcess, eventually

UNKNOWN = "chatcmpl-" + "0" * 32


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


class Pipeline:
    """What the stages and time do to a request of the module's gateway."""

    def __init__(self, settings: Settings, gateway: Gateway) -> None:
        self._settings = settings
        self._gateway = gateway

    def history(self, request_id: str) -> None:
        """The outcome reaches the store."""

        async def store() -> None:
            redis = connect(self._settings.redis)
            streams = RedisTokenStreams(redis, self._settings.streams)
            record = self._gateway.double.records[request_id]
            reply = Reply().extend(await streams.read_all(request_id))
            kept = ended_reply(make_outcome(record, reply, now_ms=record.created_ms + 1_000))
            if kept is not None:
                await StoredReplies(redis, self._settings.stored).put(kept)
            await redis.aclose()

        asyncio.run(store())

    def expire(self, request_id: str) -> None:
        """Its stream reaches the end of its retention."""
        with SyncRedis.from_url(self._settings.redis.url) as redis:
            redis.delete(stream_key(request_id))


@pytest.fixture(scope="module")
def pipeline(config: Settings, gateway: Gateway) -> Pipeline:
    return Pipeline(config, gateway)


def ask(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    body: dict[str, Any] = {"messages": script(tokens=["Hel", "lo"]), "store": True}
    done = client.chat.completions.create(model="default", **(body | fields))
    assert isinstance(done, ChatCompletion)
    return done


def test_a_kept_completion_stays_the_same_when_its_stream_has_expired_E4_E11(
    client: openai.OpenAI, pipeline: Pipeline
) -> None:
    made = ask(client, n=2, temperature=0.5, metadata={"a": "b"})
    from_stream = client.chat.completions.retrieve(made.id)
    pipeline.history(made.id)
    pipeline.expire(made.id)
    from_store = client.chat.completions.retrieve(made.id)
    shown = from_stream.model_dump() | {"system_fingerprint": None}
    assert from_store.model_dump() == shown
    assert [c.message.content for c in from_store.choices] == ["Hello", "Hello"]
    assert (shown["metadata"], shown["temperature"]) == ({"a": "b"}, 0.5)
    assert from_store.usage == made.usage


def test_a_stream_that_expired_names_where_its_answer_is_kept_E4(
    client: openai.OpenAI, gateway: Gateway, pipeline: Pipeline
) -> None:
    made = ask(client)
    pipeline.history(made.id)
    pipeline.expire(made.id)
    with pytest.raises(openai.APIStatusError) as gone:
        client.get(f"/chat/completions/{made.id}?stream=true", cast_to=object)
    assert (gone.value.status_code, gone.value.code) == (410, "stream_expired")
    assert f"GET /v1/chat/completions/{made.id}" in gone.value.message


def test_what_was_not_to_be_kept_is_not(client: openai.OpenAI, pipeline: Pipeline) -> None:
    made = ask(client, store=None, metadata={"a": "b"})
    pipeline.history(made.id)
    assert client.chat.completions.retrieve(made.id).choices[0].message.content == "Hello"
    for call in (client.chat.completions.delete, client.chat.completions.messages.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    pipeline.expire(made.id)
    with pytest.raises(openai.APIStatusError) as gone:
        client.chat.completions.retrieve(made.id)
    assert gone.value.status_code == 410


def test_a_failed_reply_is_kept_as_failed_and_not_listed_B7_B8(
    client: openai.OpenAI, pipeline: Pipeline, gateway: Gateway
) -> None:
    with pytest.raises(openai.InternalServerError) as failed:
        ask(client, messages=script(tokens=["Half", "!"], fail_after=1), metadata={"kind": "failed"})
    request_id = failed.value.response.headers["x-request-id"]
    pipeline.history(request_id)
    pipeline.expire(request_id)
    with pytest.raises(openai.InternalServerError) as again:
        client.chat.completions.retrieve(request_id)
    assert again.value.code == failed.value.code == "engine_error"
    assert client.chat.completions.list(metadata={"kind": "failed"}).data == []


def test_a_reply_still_to_reach_the_store_is_read_changed_and_deleted_E11(
    client: openai.OpenAI, gateway: Gateway, pipeline: Pipeline
) -> None:
    made = ask(client, metadata={"a": "b"})
    changed = client.chat.completions.update(made.id, metadata={"new": "1"})
    assert changed.choices[0].message.content == "Hello"
    pipeline.history(made.id)
    assert client.chat.completions.retrieve(made.id).model_dump()["metadata"] == {"new": "1"}
    other = ask(client)
    client.chat.completions.delete(other.id)
    pipeline.history(other.id)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(other.id)


def test_the_list_pages_and_filters_B10(client: openai.OpenAI, pipeline: Pipeline) -> None:
    made = [ask(client, metadata={"list": "1", "n": str(n)}) for n in range(3)]
    for one in made:
        pipeline.history(one.id)
    listed = client.chat.completions.list(limit=2, metadata={"list": "1"})
    assert listed.has_more
    assert [one.id for one in listed] == [one.id for one in made]
    backwards = client.chat.completions.list(
        limit=1, order="desc", model="default", metadata={"list": "1"}
    )
    assert [one.id for one in backwards] == [one.id for one in reversed(made)]
    assert [c.id for c in client.chat.completions.list(metadata={"list": "1", "n": "1"})] == [made[1].id]
    assert client.chat.completions.list(model="other", metadata={"list": "1"}).data == []


def test_the_messages_of_a_kept_completion(client: openai.OpenAI, pipeline: Pipeline) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi 👋", "name": "Ann"},
    ]
    made = ask(client, messages=messages)
    listed = client.chat.completions.messages.list(made.id, limit=1)
    assert [(m.role, m.content) for m in listed] == [("system", "Be brief."), ("user", "Hi 👋")]
    backwards = client.chat.completions.messages.list(made.id, order="desc")
    assert [m.id for m in backwards] == [m.id for m in listed][::-1]


def test_a_deleted_completion_is_gone_though_its_outcome_comes_again(
    client: openai.OpenAI, pipeline: Pipeline
) -> None:
    made = ask(client, metadata={"delete": "1"})
    pipeline.history(made.id)
    deleted = client.chat.completions.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "chat.completion.deleted")
    pipeline.history(made.id)
    for call in (
        client.chat.completions.retrieve,
        client.chat.completions.delete,
        client.chat.completions.messages.list,
    ):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    assert client.chat.completions.list(metadata={"delete": "1"}).data == []


def test_foreign_and_unknown_look_the_same_N4(
    client: openai.OpenAI, stranger: openai.OpenAI, pipeline: Pipeline
) -> None:
    made = ask(client)
    pipeline.history(made.id)
    answers = []
    for request_id in (made.id, UNKNOWN, "chatcmpl-x"):
        calls: list[Callable[[], object]] = [
            lambda rid=request_id: stranger.chat.completions.retrieve(rid),
            lambda rid=request_id: stranger.chat.completions.delete(rid),
            lambda rid=request_id: stranger.chat.completions.update(rid, metadata={"a": "b"}),
            lambda rid=request_id: stranger.chat.completions.messages.list(rid),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError) as refused:
                call()
            answers.append(refused.value.body)
    assert answers[:4] == answers[4:8] == answers[8:]
    assert stranger.chat.completions.list().data == []
    pipeline.expire(made.id)
    assert client.chat.completions.retrieve(made.id).choices[0].message.content == "Hello"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
        ("metadata[a]=" + "x" * 513, "metadata"),
    ],
)
def test_a_list_that_is_asked_wrongly_is_refused_by_name_C10(
    client: openai.OpenAI, query: str, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.get(f"/chat/completions?{query}", cast_to=object)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "body", [{}, {"metadata": 1}, {"metadata": {"a": 1}}, {"metadata": {"k" * 65: "v"}}]
)
def test_metadata_that_is_none_is_refused_by_name_C10(client: openai.OpenAI, body: object) -> None:
    made = ask(client)
    with pytest.raises(openai.BadRequestError) as refused:
        client.post(f"/chat/completions/{made.id}", body=body, cast_to=object)
    assert refused.value.param == "metadata"


def test_through_the_whole_stack_history_stores_what_was_to_be_kept(sim_stack: StackProcess) -> None:
    client = openai.OpenAI(base_url=f"{sim_stack.url}/v1", api_key=DEV_PAID_KEY, max_retries=0)
    made = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Keep this"}],
        max_tokens=5,
        store=True,
        metadata={"whole": "stack"},
    )
    wanted = {"whole": "stack"}
    listed = eventually(lambda: client.chat.completions.list(metadata=wanted).data, 20, "it is listed")
    assert [one.id for one in listed] == [made.id]
    assert listed[0].choices[0].message.content == made.choices[0].message.content
    assert listed[0].usage == made.usage
