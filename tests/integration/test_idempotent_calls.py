"""A call that comes again: O5, on a real Redis, and through a whole stack over HTTP and websocket."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from websockets.asyncio.client import connect as ws_connect

from contracts.entries import Terminal, Text
from contracts.errors import ApiError, ErrorCode, error_body
from contracts.stream_ids import StreamId
from contracts.tiers import Status
from infra.settings import Settings
from producers.idempotency import KEEP_SECONDS, Once, once_of
from tests.attempts import start_attempt
from tests.integration.test_gateway_intake import OTHER, PAID, Parts
from tests.stack_process import FREE_KEY, PAID_KEY, StackProcess

BODY = {"model": "default", "messages": [{"role": "user", "content": "once"}], "max_tokens": 4}
URL = "/v1/chat/completions"


@pytest.fixture
async def parts(settings: Callable[..., Settings]) -> AsyncIterator[Parts]:
    made = Parts(settings(kafka={"bootstrap": "127.0.0.1:1"}))
    yield made
    await made.intake.settle()
    await made.client.aclose()


def once(body: object = BODY, key: str = "key-1") -> Once:
    found = once_of(key, body)
    assert found is not None
    return found


async def call(parts: Parts, key: str = "key-1", **fields: Any) -> str:
    return (await parts.intake.accept(PAID, BODY | fields, idempotency_key=key)).request_id


async def test_o5_concurrent_repeats_are_one_request_and_so_are_later_ones(parts: Parts) -> None:
    parts.publisher.gate = asyncio.Event()
    calls = [asyncio.create_task(call(parts, stream=bool(k % 2))) for k in range(10)]
    await parts.publisher.waiting.wait()
    parts.publisher.gate.set()
    ids = set(await asyncio.gather(*calls))
    assert len(ids) == 1
    assert [r.request_id for r in parts.publisher.sent] == list(ids)
    await parts.complete(parts.publisher.sent[0], "done")
    parts.now_ms += 3_600_000
    assert {await call(parts)} == ids
    assert len(parts.publisher.sent) == 1


async def test_o5_n5_another_body_is_refused_and_changes_nothing(parts: Parts) -> None:
    rid = await call(parts)
    with pytest.raises(ApiError) as raised:
        await call(parts, seed=7)
    assert (raised.value.status, raised.value.code) == (422, ErrorCode.IDEMPOTENCY_MISMATCH)
    assert await call(parts) == rid


async def test_o5_keys_of_tenants_are_apart(parts: Parts) -> None:
    mine = await call(parts)
    theirs = (await parts.intake.accept(OTHER, BODY | {"seed": 7}, idempotency_key="key-1")).request_id
    assert mine != theirs
    assert await call(parts, key="key-2") not in (mine, theirs)


async def test_o5_a_failed_acceptance_gives_the_key_back(parts: Parts) -> None:
    parts.publisher.failing = True
    with pytest.raises(ApiError):
        await call(parts)
    parts.publisher.failing = False
    rid = await call(parts, seed=7)
    assert [r.request_id for r in parts.publisher.sent] == [rid]


@pytest.mark.parametrize(("code", "text", "again"), [
    (ErrorCode.REQUEST_LOST, False, True),
    (ErrorCode.DEADLINE_EXCEEDED, False, True),
    (ErrorCode.WORKER_LOST, True, False),
    (ErrorCode.CONTENT_FILTER, False, False),
])  # fmt: skip
async def test_o5_what_failed_for_nothing_can_be_repeated_with_its_key(
    parts: Parts, code: ErrorCode, text: bool, again: bool
) -> None:
    rid = await call(parts)
    if text:
        await start_attempt(parts.streams, rid, 1)
        await parts.streams.append([(rid, StreamId(1, 1), Text("a", (1,)))])
    await parts.streams.seal(rid, Terminal(status=Status.FAILED, error=error_body(code, "over")))
    repeated = set(await asyncio.gather(*(call(parts) for _ in range(4))))
    assert len(repeated) == 1
    assert (rid not in repeated) is again


async def test_o5_a_caller_that_left_finds_its_request_when_it_comes_again(parts: Parts) -> None:
    parts.publisher.gate = asyncio.Event()
    first = asyncio.create_task(call(parts))
    await parts.publisher.waiting.wait()
    first.cancel()
    again = asyncio.create_task(call(parts))
    parts.publisher.gate.set()
    assert await again == parts.publisher.last.request_id
    assert len(parts.publisher.sent) == 1


async def test_a_claim_of_a_process_that_died_is_taken_over_and_released_by_its_holder_only(
    parts: Parts,
) -> None:
    keys = parts.intake._keys
    assert await keys.claim("dev", once(), "chatcmpl-dead") is None
    assert await keys.claim("dev", once(), "chatcmpl-dead") is None, "our own, asked for again"
    await keys.release("dev", "key-1", "chatcmpl-somebody-else")
    waiting = asyncio.create_task(call(parts))
    _, pending = await asyncio.wait({waiting}, timeout=0.2)
    assert pending, "it may still be accepted"
    parts.now_ms += 16_000
    rid = await waiting
    assert [r.request_id for r in parts.publisher.sent] == [rid]


async def test_a_key_is_forgotten_after_a_day(parts: Parts) -> None:
    await call(parts)
    [name] = await parts.client.keys("hr:idem:*")
    assert KEEP_SECONDS - 60 < await parts.client.ttl(name) <= KEEP_SECONDS


async def test_o5_http_repeats_get_the_same_completion(sim_stack: StackProcess) -> None:
    await asyncio.to_thread(sim_stack.wait_ready)
    headers = {"Authorization": f"Bearer {PAID_KEY}", "Idempotency-Key": secrets.token_hex(8)}
    async with httpx.AsyncClient(base_url=sim_stack.url, headers=headers, timeout=30) as http:
        answers = await asyncio.gather(*(http.post(URL, json=BODY) for _ in range(5)))
        assert {a.status_code for a in answers} == {200}
        assert len({a.json()["id"] for a in answers}) == 1
        assert len({a.text for a in answers}) == 1
        other = await http.post(URL, json=BODY | {"max_tokens": 5})
        assert other.status_code == 422
        assert other.json()["error"]["code"] == "idempotency_mismatch"
        foreign = {"Authorization": f"Bearer {FREE_KEY}"}
        theirs = await http.post(URL, json=BODY, headers=foreign)
        assert theirs.json()["id"] != answers[0].json()["id"]
        bad = await http.post(URL, json=BODY, headers={"Idempotency-Key": "a b"})
        assert bad.status_code == 400


async def test_o5_an_sdk_that_times_out_and_retries_gets_one_generation(
    sim_stack: StackProcess,
) -> None:
    await asyncio.to_thread(sim_stack.wait_ready)
    key = secrets.token_hex(8)
    async with AsyncOpenAI(
        base_url=f"{sim_stack.url}/v1", api_key=PAID_KEY, timeout=1.0, max_retries=10
    ) as client:
        done = await client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "slow"}],
            max_tokens=300,
            extra_headers={"Idempotency-Key": key},
        )
        again = await client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "slow"}],
            max_tokens=300,
            extra_headers={"Idempotency-Key": key},
        )
    assert again.id == done.id
    assert done.usage is not None
    assert done.usage.completion_tokens == 300


async def test_o5_a_websocket_repeats_by_its_idempotency_key(sim_stack: StackProcess) -> None:
    await asyncio.to_thread(sim_stack.wait_ready)
    headers = {"Authorization": f"Bearer {PAID_KEY}"}
    key = secrets.token_hex(8)

    async def create(ref: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        frame = {"type": "chat.create", "ref": ref, "body": body, "idempotency_key": key}
        async with ws_connect(sim_stack.ws_url, additional_headers=headers) as socket:
            await socket.send(json.dumps(frame))
            first, text = json.loads(await socket.recv()), ""
            while first["type"] == "chat.accepted":
                frame = json.loads(await socket.recv())
                text += frame.get("text", "")
                if frame["type"] == "stream.end":
                    break
            return first, text

    (one, text), (two, same) = await create("a", BODY), await create("b", BODY)
    assert (one["ref"], two["ref"]) == ("a", "b")
    assert one["request_id"] == two["request_id"]
    assert text == same != ""
    refused, _ = await create("c", BODY | {"max_tokens": 5})
    assert (refused["type"], refused["ref"]) == ("error", "c")
    assert refused["error"]["code"] == "idempotency_mismatch"
