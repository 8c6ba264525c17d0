"""A gateway whose pools are overloaded: what clients get, and how they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import openai
import pytest

from contracts.degraded import OverloadLevel, OverloadStep
from infra.overload_redis import OverloadBoard
from infra.settings import DEV_FREE_KEY, DEV_PAID_KEY, Settings
from infra.stream_redis import connect
from infra.tasks import end_tasks
from infra.telemetry import DEGRADED
from producers.fresh_copy import STALE_SECONDS
from tests.integration.gateway_fixture import Gateway, running_gateway
from tests.integration.pipeline_double import script

MODELS = {
    "large": {"path": "builtin:sim", "pool": "large", "fallback": "small", "aliases": ["default"]},
    "small": {"path": "builtin:sim", "pool": "small"},
}
HEADER = "x-headrace-degraded"


@asynccontextmanager
async def overloaded(settings: Settings, **steps: OverloadStep) -> AsyncIterator[Gateway]:
    """A gateway while a scheduler says that pools are at these steps."""
    client = connect(settings.redis)
    board = OverloadBoard(client)
    levels = {pool: OverloadLevel(step, f"{pool} is slow") for pool, step in steps.items()}

    async def say() -> None:
        while True:
            await board.publish("s", levels)
            await asyncio.sleep(STALE_SECONDS / 2)

    await board.publish("s", levels)
    saying = asyncio.create_task(say())
    try:
        async with running_gateway(settings) as gateway:
            yield gateway
    finally:
        await end_tasks([saying])
        await client.aclose()


@pytest.fixture
def made(settings: Callable[..., Settings]) -> Settings:
    raw = settings().model_dump(mode="json")
    return Settings.model_validate(raw | {"models": MODELS})


async def test_a_free_reply_by_the_fallback_names_the_model_that_ran_and_says_why(
    made: Settings,
) -> None:
    async with overloaded(made, large=OverloadStep.STANDARD_SMALLER_MODEL) as gateway:
        free = gateway.openai(DEV_FREE_KEY).chat.completions
        raw = await free.with_raw_response.create(model="default", messages=script(tokens=["a"]))
        done = raw.parse()
        assert (done.model, raw.headers[HEADER]) == ("small", "standard_smaller_model")
        extra = done.model_extra or {}
        assert extra["degraded"] == {"step": "standard_smaller_model", "reason": "large is slow"}
        record = gateway.double.records[done.id]
        assert (record.model, record.pool) == ("small", "small")
        assert record.degraded is not None
        assert record.deadline_ms - record.created_ms == 360_000

        async with free.with_streaming_response.create(
            model="large", messages=script(tokens=["a"]), stream=True
        ) as streamed:
            assert streamed.headers[HEADER] == "standard_smaller_model"
            text = "".join([line async for line in streamed.iter_text()])
        assert '"model":"small"' in text
        assert '"model":"large"' not in text

        paid = await gateway.openai(DEV_PAID_KEY).chat.completions.with_raw_response.create(
            model="default", messages=script(tokens=["a"])
        )
        assert paid.parse().model == "large"
        assert HEADER not in paid.headers
        assert "degraded" not in (paid.parse().model_extra or {})


async def test_a_reply_read_again_still_says_what_it_got_less_of(made: Settings) -> None:
    async with overloaded(made, large=OverloadStep.STANDARD_SMALLER_MODEL) as gateway:
        free = gateway.openai(DEV_FREE_KEY)
        done = await free.chat.completions.create(model="large", messages=script(tokens=["a", "b"]))
        headers = {"Authorization": f"Bearer {DEV_FREE_KEY}"}
        url = f"/v1/chat/completions/{done.id}"
        for query in ("", "?stream=true", "?stream=true&after=1-1"):
            again = await gateway.http.get(url + query, headers=headers)
            assert again.headers[HEADER] == "standard_smaller_model"
            assert '"model":"small"' in again.text


async def test_refused_users_hear_429_with_retry_after_and_are_counted_j7(made: Settings) -> None:
    refused = DEGRADED.labels("standard_refused", "free")
    before = refused._value.get()
    steps = {"large": OverloadStep.STANDARD_REFUSED, "small": OverloadStep.STANDARD_REFUSED}
    async with overloaded(made, **steps) as gateway:
        with pytest.raises(openai.RateLimitError) as caught:
            await gateway.openai(DEV_FREE_KEY).chat.completions.create(
                model="default", messages=script(tokens=["a"]), extra_body={"conversation_id": "c"}
            )
        assert caught.value.code == "overloaded"
        assert caught.value.response.headers["retry-after"] == "15"
        assert refused._value.get() == before + 1
        assert gateway.double.records == {}
        await gateway.openai(DEV_PAID_KEY).chat.completions.create(
            model="default", messages=script(tokens=["a"])
        )


async def test_a_refused_turn_leaves_its_conversation_free(made: Settings) -> None:
    steps = {"large": OverloadStep.STANDARD_REFUSED, "small": OverloadStep.STANDARD_REFUSED}
    async with overloaded(made, **steps) as gateway:
        for _ in range(2):
            with pytest.raises(openai.RateLimitError) as caught:
                await gateway.openai(DEV_FREE_KEY).chat.completions.create(
                    model="default", messages=script(tokens=["a"]), extra_body={"conversation_id": "c"}
                )
            assert caught.value.code == "overloaded"


async def test_paid_users_are_refused_last(made: Settings) -> None:
    async with overloaded(made, large=OverloadStep.INTERACTIVE_REFUSED) as gateway:
        with pytest.raises(openai.RateLimitError) as caught:
            await gateway.openai(DEV_PAID_KEY).chat.completions.create(
                model="default", messages=script(tokens=["a"])
            )
        assert caught.value.code == "overloaded"
