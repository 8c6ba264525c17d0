"""LangChain's OpenAI chat class against the gateway, as people use it: streaming and not, both APIs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from infra.settings import DEV_PAID_KEY, Settings
from tests.integration.gateway_fixture import Gateway, gateway_in_a_thread
from tests.integration.pipeline_double import script

SAID = script(tokens=["Paris", " it", " is"])[0]["content"]
ASKED = [SystemMessage("Be brief."), HumanMessage("Hello"), AIMessage("Hi"), HumanMessage(SAID)]


@pytest.fixture(scope="module")
def gateway(module_settings: Callable[..., Settings]) -> Iterator[Gateway]:
    with gateway_in_a_thread(module_settings()) as running:
        yield running


@pytest.fixture(params=[False, True], ids=["chat completions", "responses"])
def chat(gateway: Gateway, request: pytest.FixtureRequest) -> ChatOpenAI:
    return ChatOpenAI(
        model="default",
        base_url=f"{gateway.url}/v1",
        api_key=SecretStr(DEV_PAID_KEY),
        use_responses_api=request.param,
        http_async_client=httpx.AsyncClient(),  # LangChain's own outlives the test's event loop
        temperature=0,
        max_retries=0,
        timeout=20,
    )


def test_a_call(chat: ChatOpenAI) -> None:
    answer = chat.invoke(ASKED)
    assert answer.text == "Paris it is"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["total_tokens"] == 10


def test_a_stream(chat: ChatOpenAI) -> None:
    parts = [part.text for part in chat.stream(ASKED)]
    assert [part for part in parts if part] == ["Paris", " it", " is"]


async def test_calls_beside_each_other(chat: ChatOpenAI) -> None:
    answers = await chat.abatch([ASKED] * 4)
    assert [answer.text for answer in answers] == ["Paris it is"] * 4


def test_a_refusal_is_the_client_s_own_error(chat: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        chat.invoke(script(refuse="context_length_exceeded")[0]["content"])
