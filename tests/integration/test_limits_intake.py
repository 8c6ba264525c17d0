"""Limits through whole intakes on a real Redis: what passes, and what a refused call leaves taken."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from contracts.entries import Moderated, Started, Terminal, Text
from contracts.errors import ApiError, ErrorCode
from contracts.stream_ids import MODERATED, StreamId
from contracts.tiers import Status
from infra.settings import Settings
from producers.intake import MAX_RECORD_BYTES
from tests.integration.test_gateway_intake import PAID, Parts

LIMITS = {"requests_per_minute": 1_000, "tokens_per_minute": 10_000_000, "concurrent": 2}


@pytest.fixture
async def intakes(settings: Callable[..., Settings]) -> AsyncIterator[list[Parts]]:
    """Three of them, as of three gateways, over one Redis."""
    raw = settings(kafka={"bootstrap": "127.0.0.1:1"}).model_dump(mode="json")
    raw["keys"][0]["limits"] = LIMITS
    made = [Parts(Settings.model_validate(raw)) for _ in range(3)]
    yield made
    for parts in made:
        await parts.intake.settle()
        await parts.client.aclose()


async def accept(parts: Parts, text: str = "hi", **fields: Any) -> str:
    """Request id, or the code of the refusal."""
    body = {"model": "default", "messages": [{"role": "user", "content": text}]}
    key = fields.pop("idempotency_key", None)
    try:
        return (await parts.intake.accept(PAID, body | fields, idempotency_key=key)).request_id
    except ApiError as error:
        return error.code.value


async def taken(parts: Parts) -> dict[str, int]:
    """What is taken now: requests and tokens of the minute, permits, reservations."""
    client: Any = parts.client
    minute = {part: await client.hvals(f"hr:{{limits}}:key:dev:{part}") for part in ("r", "t")}
    return {
        "requests": sum(map(int, minute["r"])),
        "tokens": sum(map(int, minute["t"])),
        "permits": await client.zcard("hr:{limits}:key:dev:o"),
        "reservations": len(await client.keys("hr:{limits}:taken:*")),
    }


NOTHING = {"requests": 0, "tokens": 0, "permits": 0, "reservations": 0}


async def test_three_intakes_accept_two_of_thirty_and_two_more_when_they_have_ended_J4_J1(
    intakes: list[Parts],
) -> None:
    for _ in range(3):
        found = await asyncio.gather(*(accept(intakes[n % 3]) for n in range(30)))
        refused = ErrorCode.CONCURRENCY_LIMIT.value
        assert Counter(found)[refused] == 28
        for request_id in set(found) - {refused}:
            await intakes[0].streams.seal(request_id, Terminal(status=Status.CANCELLED))


@pytest.mark.parametrize(
    ("text", "failing", "code"),
    [
        ("hi", True, ErrorCode.UNAVAILABLE),
        ("x" * MAX_RECORD_BYTES, False, ErrorCode.REQUEST_TOO_LARGE),
    ],
)
async def test_what_fails_after_it_has_taken_gives_all_back_at_once_J2(
    intakes: list[Parts], text: str, failing: bool, code: ErrorCode
) -> None:
    parts = intakes[0]
    parts.publisher.failing = failing
    for _ in range(3):
        assert await accept(parts, text) == code.value
        assert await taken(parts) == NOTHING


@pytest.mark.parametrize("fields", [{"model": "unknown"}, {"messages": [{"role": "x", "content": "x"}]}])
async def test_what_is_not_valid_takes_nothing_J2(intakes: list[Parts], fields: dict[str, Any]) -> None:
    await accept(intakes[0], **fields)
    assert await taken(intakes[0]) == NOTHING


async def test_a_busy_conversation_refuses_without_taking(intakes: list[Parts]) -> None:
    await accept(intakes[0], conversation_id="c")
    before = await taken(intakes[0])
    assert before["requests"] == 1
    busy = await accept(intakes[1], conversation_id="c")
    assert busy == ErrorCode.CONVERSATION_BUSY.value
    assert await taken(intakes[0]) == before


async def test_a_call_repeated_with_its_idempotency_key_takes_once(intakes: list[Parts]) -> None:
    found = {await accept(parts, idempotency_key="k") for parts in intakes for _ in range(2)}
    assert len(found) == 1
    assert (await taken(intakes[0]))["requests"] == 1


async def _moderated(parts: Parts, rid: str) -> None:
    await parts.streams.append([(rid, MODERATED, Moderated(prompt_tokens=1))])


async def _begun(parts: Parts, rid: str) -> None:
    started = Started(worker_id="w", model_revision="1")
    await parts.streams.append(
        [
            (rid, MODERATED, Moderated(prompt_tokens=1)),
            (rid, StreamId(1, 0), started),
            (rid, StreamId(1, 1), Text("a", (1,))),
        ]
    )


async def _nothing(_parts: Parts, _rid: str) -> None: ...


@pytest.mark.parametrize("reached", [_nothing, _moderated, _begun])
async def test_a_permit_comes_back_a_hundred_times_wherever_the_request_was_left_J1(
    intakes: list[Parts], reached: Callable[[Parts, str], Awaitable[None]]
) -> None:
    """While moderation has it, in the queue, in the middle of its reply."""
    first, second, third = intakes
    for _ in range(100):
        ids = [await accept(first), await accept(second)]
        assert await accept(third) == ErrorCode.CONCURRENCY_LIMIT.value
        for rid in ids:
            await reached(first, rid)
            await third.intake.cancel(PAID, rid)
    await accept(third)
    assert (await taken(first))["permits"] == 1


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.CANCELLED])
async def test_a_permit_comes_back_however_a_request_ends_J2(
    intakes: list[Parts], status: Status
) -> None:
    parts = intakes[0]
    for _ in range(10):
        ids = [await accept(parts), await accept(parts)]
        assert await accept(parts) == ErrorCode.CONCURRENCY_LIMIT.value
        for rid in ids:
            await parts.streams.seal(rid, Terminal(status=status))
    await accept(parts)
    assert (await taken(parts))["permits"] == 1
