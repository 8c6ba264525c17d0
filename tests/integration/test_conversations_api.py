"""The Conversations API through the official client, and what requests make of its conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from infra.settings import DEV_FREE_KEY, DEV_PAID_KEY, Settings
from tests.integration.gateway_fixture import Gateway, gateway_in_a_thread
from tests.integration.pipeline_double import script

UNKNOWN = "conv_" + "0" * 32


@pytest.fixture(scope="module")
def gateway(module_settings: Callable[..., Settings]) -> Iterator[Gateway]:
    with gateway_in_a_thread(module_settings()) as running:
        yield running


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=DEV_PAID_KEY, max_retries=0, timeout=20)


def says(text: Any, role: str = "user") -> Any:
    return {"type": "message", "role": role, "content": text}


def texts(items: Any) -> list[str]:
    return [part.text for item in items for part in item.content]


def ask(client: openai.OpenAI, conversation_id: str, **play: Any) -> str:
    done = client.chat.completions.create(
        model="default", messages=script(**play), extra_body={"conversation_id": conversation_id}
    )
    return done.id


def test_a_conversation_is_made_read_changed_and_deleted(client: openai.OpenAI) -> None:
    made = client.conversations.create(metadata={"a": "b"}, items=[says("Hi")])
    assert made.id.startswith("conv_")
    assert (made.object, made.metadata) == ("conversation", {"a": "b"})
    assert client.conversations.retrieve(made.id) == made
    changed = client.conversations.update(made.id, metadata={"c": "d"})
    assert changed == client.conversations.retrieve(made.id)
    assert (changed.metadata, changed.created_at) == ({"c": "d"}, made.created_at)
    assert client.conversations.delete(made.id).deleted
    for call in (
        client.conversations.retrieve,
        client.conversations.delete,
        client.conversations.items.list,
    ):
        with pytest.raises(openai.NotFoundError):
            call(made.id)


def test_items_are_added_listed_read_and_removed(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(items=[says("one", "system")]).id
    parts = [{"type": "input_text", "text": "two"}, {"type": "input_text", "text": "2 👩‍💻"}]
    added = client.conversations.items.create(
        conversation, items=[says(parts), says("three", "assistant")]
    )
    assert texts(added.data) == ["two\n2 👩‍💻", "three"]
    listed = client.conversations.items.list(conversation, limit=2, order="asc")
    assert texts(listed) == ["one", "two\n2 👩‍💻", "three"]
    assert texts(client.conversations.items.list(conversation, limit=1)) == texts(listed)[::-1]
    ids = [item.id for item in listed]
    third: Any = client.conversations.items.retrieve(ids[2], conversation_id=conversation)
    assert (third.role, third.status, third.content[0].type) == ("assistant", "completed", "output_text")
    assert client.conversations.items.delete(ids[1], conversation_id=conversation).id == conversation
    assert [item.id for item in client.conversations.items.list(conversation, order="asc")] == [
        ids[0],
        ids[2],
    ]
    for call in (client.conversations.items.retrieve, client.conversations.items.delete):
        with pytest.raises(openai.NotFoundError):
            call(ids[1], conversation_id=conversation)


def test_a_request_goes_on_after_the_items_and_its_answer_is_one_at_once_E11_E14(
    client: openai.OpenAI, gateway: Gateway
) -> None:
    conversation = client.conversations.create(items=[says("Be brief.", "system")]).id
    first = ask(client, conversation, tokens=["Hel", "lo"])
    question = gateway.double.records[first].turn[0].content
    listed = client.conversations.items.list(conversation, order="asc")
    assert texts(listed) == ["Be brief.", question, "Hello"]
    gone = list(listed)[1].id
    client.conversations.items.delete(gone, conversation_id=conversation)
    client.conversations.items.create(conversation, items=[says("By hand")])
    second = ask(client, conversation, tokens=["ok"])
    assert [m.content for m in gateway.double.records[second].messages[:-1]] == [
        "Be brief.",
        "Hello",
        "By hand",
    ]


def test_a_failed_turn_leaves_no_item_B8_O4(client: openai.OpenAI) -> None:
    conversation = client.conversations.create().id
    with pytest.raises(openai.InternalServerError):
        ask(client, conversation, tokens=["Half", "!"], fail_after=1)
    assert texts(client.conversations.items.list(conversation)) == []


def test_foreign_and_unknown_look_the_same_N4(client: openai.OpenAI, gateway: Gateway) -> None:
    stranger = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=DEV_FREE_KEY, max_retries=0)
    made = client.conversations.create(items=[says("secret")])
    (item,) = client.conversations.items.list(made.id).data
    assert item.id is not None
    answers = []
    for conversation in (made.id, UNKNOWN, "name"):
        calls: list[Callable[..., object]] = [
            lambda c: stranger.conversations.retrieve(c),
            lambda c: stranger.conversations.update(c, metadata={}),
            lambda c: stranger.conversations.delete(c),
            lambda c: stranger.conversations.items.list(c),
            lambda c: stranger.conversations.items.create(c, items=[says("x")]),
            lambda c: stranger.conversations.items.retrieve(item.id or "", conversation_id=c),
            lambda c: stranger.conversations.items.delete(item.id or "", conversation_id=c),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError) as refused:
                call(conversation)
            answers.append(refused.value.body)
    assert answers == [answers[0]] * len(answers)
    assert texts(client.conversations.items.list(made.id)) == ["secret"]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([], "items"),
        ([says("x")] * 21, "items"),
        ("x", "items"),
        ([1], "items[0]"),
        ([says("x"), says("x", "tool")], "items[1].role"),
        ([says(None)], "items[0].content"),
        ([says([])], "items[0].content"),
        ([says([{"type": "input_image", "text": "x"}])], "items[0].content[0]"),
        ([says([{"type": "input_text"}])], "items[0].content[0].text"),
        ([{"type": "function_call_output", "output": "x"}], "items[0].type"),
    ],
)
def test_an_item_that_is_none_is_refused_by_name_C10(
    client: openai.OpenAI, items: object, param: str
) -> None:
    conversation = client.conversations.create().id
    with pytest.raises(openai.BadRequestError) as refused:
        client.post(f"/conversations/{conversation}/items", body={"items": items}, cast_to=object)
    assert refused.value.param == param
    assert texts(client.conversations.items.list(conversation)) == []
