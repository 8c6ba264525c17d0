"""The official client against the gateway: shapes, streams, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import openai
import pytest

from infra.settings import DEV_FREE_KEY, Settings
from tests.integration.gateway_fixture import Gateway, running_gateway
from tests.integration.pipeline_double import script

PIECES = ["Grüß", " dich", ",\u2028", "👩‍💻", " ok", "."]
TEXT = "".join(PIECES)


@pytest.fixture
async def gateway(settings: Callable[..., Settings]) -> AsyncIterator[Gateway]:
    async with running_gateway(settings()) as running:
        yield running


async def test_a_whole_completion(gateway: Gateway) -> None:
    raw = await gateway.openai().chat.completions.with_raw_response.create(
        model="default", messages=script(tokens=PIECES), logprobs=True
    )
    done = raw.parse()
    assert raw.headers["x-request-id"] == done.id
    assert done.object == "chat.completion"
    assert done.model == "headrace-sim"
    assert done.system_fingerprint == "rev-1"
    assert done.choices[0].message.content == TEXT
    assert done.choices[0].finish_reason == "stop"
    assert done.choices[0].logprobs is not None
    assert [t.token for t in done.choices[0].logprobs.content or ()] == PIECES
    assert done.usage is not None
    assert done.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 7,
        "completion_tokens": len(PIECES),
        "total_tokens": 7 + len(PIECES),
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_b1_a_stream_with_usage(gateway: Gateway) -> None:
    chunks = [
        chunk
        async for chunk in await gateway.openai().chat.completions.create(
            model="default",
            messages=script(tokens=PIECES),
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    assert {c.id for c in chunks} == {chunks[0].id}
    assert {c.model for c in chunks} == {"headrace-sim"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == TEXT
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(PIECES)
    assert all(c.usage is None for c in chunks[:-1])


async def test_b4_two_choices_streamed_and_whole(gateway: Gateway) -> None:
    client = gateway.openai()
    texts = {0: "", 1: ""}
    finishes: list[int] = []
    async for chunk in await client.chat.completions.create(
        model="default", messages=script(tokens=PIECES), n=2, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finishes.append(choice.index)
    assert texts == {0: TEXT, 1: TEXT}
    assert sorted(finishes) == [0, 1]
    whole = await client.chat.completions.create(model="default", messages=script(tokens=PIECES), n=2)
    assert [(c.index, c.message.content) for c in whole.choices] == [(0, TEXT), (1, TEXT)]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 2 * len(PIECES)


async def test_b5_an_empty_answer_is_an_answer(gateway: Gateway) -> None:
    client = gateway.openai()
    whole = await client.chat.completions.create(model="default", messages=script(tokens=[]))
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("", "stop")
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="default", messages=script(tokens=[]), stream=True
        )
    ]
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_b7_a_failure_in_mid_stream_is_an_error_not_an_end(gateway: Gateway) -> None:
    text = ""
    finishes: set[str | None] = set()

    async def read() -> None:
        nonlocal text
        async for chunk in await gateway.openai().chat.completions.create(
            model="default", messages=script(tokens=PIECES, fail_after=3), stream=True
        ):
            text += chunk.choices[0].delta.content or ""
            finishes.add(chunk.choices[0].finish_reason)

    with pytest.raises(openai.APIError) as raised:
        await read()
    assert text == "".join(PIECES[:3])
    assert finishes == {None}
    assert raised.value.code == "engine_error"
    with pytest.raises(openai.InternalServerError) as whole:
        await gateway.openai().chat.completions.create(
            model="default", messages=script(tokens=PIECES, fail_after=3)
        )
    assert whole.value.code == "engine_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_refused_early_is_a_real_status(gateway: Gateway, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await gateway.openai().chat.completions.create(
            model="default", messages=script(refuse="context_length_exceeded"), stream=stream
        )
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.param == "messages"


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_at_the_door(gateway: Gateway, stream: bool) -> None:
    client = gateway.openai()
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model="default", messages=script(), temperature=9, stream=stream)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as empty:
        await create(model="default", messages=[], stream=stream)
    assert empty.value.param == "messages"
    with pytest.raises(openai.NotFoundError) as unknown:
        await create(model="nope", messages=script(), stream=stream)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as stranger:
        await gateway.openai("sk-wrong").chat.completions.create(
            model="default", messages=script(), stream=stream
        )
    assert stranger.value.code == "invalid_api_key"
    assert stranger.value.response.headers["www-authenticate"].startswith("Bearer")
    assert not gateway.double.records


async def test_models_are_listed_under_every_name(gateway: Gateway) -> None:
    client = gateway.openai(DEV_FREE_KEY)
    assert [m.id for m in (await client.models.list()).data] == ["headrace-sim", "default"]
    assert (await client.models.retrieve("default")).id == "default"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nope/nope")


async def test_moderations_are_what_the_pipelines_moderators_think(gateway: Gateway) -> None:
    found = await gateway.openai().moderations.create(input=["What a nice day", "you fucking idiot"])
    fine, abuse = found.results
    assert (fine.flagged, abuse.flagged) == (False, True)
    assert abuse.categories.harassment
    assert not abuse.categories.violence
    assert fine.category_scores.harassment < 0.9 <= abuse.category_scores.harassment
    with pytest.raises(openai.NotFoundError):
        await gateway.openai().moderations.create(input="x", model="no-such-model")
    with pytest.raises(openai.AuthenticationError):
        await gateway.openai("sk-wrong").moderations.create(input="x")
