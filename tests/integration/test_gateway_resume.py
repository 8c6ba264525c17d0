"""Reading a reply again: offsets, other people's requests, expired streams, cancelling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import pytest

from contracts.stream_ids import SEAL
from infra.settings import DEV_FREE_KEY, Settings
from infra.stream_redis import connect, stream_key
from tests.integration.gateway_fixture import Gateway, eventually, running_gateway
from tests.integration.pipeline_double import script

URL = "/v1/chat/completions"
PIECES = [f"w{k} 👩‍💻" for k in range(40)]
TEXT = "".join(PIECES)
FOREIGN = {"Authorization": f"Bearer {DEV_FREE_KEY}"}


@pytest.fixture
async def gateway(settings: Callable[..., Settings]) -> AsyncIterator[Gateway]:
    async with running_gateway(settings(edge={"send_timeout_seconds": 2, "port": 0})) as running:
        yield running


@dataclass
class Events:
    """What a reader of server-sent events got."""

    text: str = ""
    ids: list[str] = field(default_factory=list)
    done: bool = False
    finish: str | None = None
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None

    def line(self, line: str) -> None:
        if line.startswith("id: "):
            self.ids.append(line[4:])
        if not line.startswith("data: "):
            return
        if line == "data: [DONE]":
            self.done = True
            return
        data = orjson.loads(line[6:])
        self.error = data.get("error")
        self.usage = data.get("usage") or self.usage
        for choice in data.get("choices", ()):
            self.text += choice["delta"].get("content") or ""
            self.finish = choice["finish_reason"] or self.finish


async def read_events(response: httpx.Response, stop_at: int | None = None) -> Events:
    events = Events()
    assert response.status_code == 200, await response.aread()
    async for line in response.aiter_lines():
        events.line(line)
        if stop_at is not None and len(events.ids) > stop_at and line == "":
            break
    return events


async def create(gateway: Gateway, stop_at: int | None = None, **play: Any) -> tuple[str, Events]:
    body = {"model": "default", "messages": script(**play), "stream": True}
    async with gateway.http.stream("POST", URL, json=body) as response:
        return response.headers["x-request-id"], await read_events(response, stop_at)


async def resume(gateway: Gateway, request_id: str, **parameters: str) -> Events:
    query = {"stream": "true", **parameters}
    async with gateway.http.stream("GET", f"{URL}/{request_id}", params=query) as response:
        return await read_events(response)


async def test_e1_cut_at_ten_offsets_the_text_is_whole(gateway: Gateway) -> None:
    for cut in (0, 1, 2, 5, 9, 17, 25, 33, 39, 40):
        request_id, head = await create(gateway, stop_at=cut, tokens=PIECES)
        rest = await resume(gateway, request_id, after=head.ids[-1])
        assert head.text + rest.text == TEXT
        assert rest.done
        assert rest.finish == "stop"
        url, last = f"{URL}/{request_id}?stream=true", {"Last-Event-ID": head.ids[-1]}
        again = await gateway.http.get(url, headers=last)
        assert again.text.endswith("data: [DONE]\n\n")


async def test_e1_resume_while_it_still_runs(gateway: Gateway) -> None:
    request_id, head = await create(gateway, stop_at=5, tokens=PIECES, hold_before=20)
    reading = asyncio.create_task(resume(gateway, request_id, after=head.ids[-1], include_usage="1"))
    gateway.double.release()
    rest = await reading
    assert head.text + rest.text == TEXT
    assert rest.usage is not None
    assert rest.usage["completion_tokens"] == len(PIECES)


async def test_b7_a_resume_replays_tokens_and_the_same_error(gateway: Gateway) -> None:
    request_id, whole = await create(gateway, tokens=PIECES[:8], fail_after=5)
    assert whole.error is not None
    assert (whole.text, whole.done) == ("".join(PIECES[:5]), False)
    for offset, text in ("1-3", "".join(PIECES[3:5])), ("1-5", ""):
        again = await resume(gateway, request_id, after=offset)
        assert (again.text, again.error, again.done) == (text, whole.error, False)


@pytest.mark.parametrize(
    ("offset", "status", "code"),
    [
        ("-1", 400, "invalid_offset"),
        ("abc", 400, "invalid_offset"),
        ("$", 400, "invalid_offset"),
        ("0", 400, "invalid_offset"),
        ("1-1-1", 400, "invalid_offset"),
        ("", 400, "invalid_offset"),
        ("9" * 10_000, 400, "invalid_offset"),
        ("9999999999999-0", 409, "offset_ahead"),
        ("1-7", 409, "offset_ahead"),
    ],
)
async def test_e5_bad_offsets_are_refused_before_the_stream_opens(
    gateway: Gateway, offset: str, status: int, code: str
) -> None:
    request_id, head = await create(gateway, stop_at=2, tokens=PIECES, hold_before=5)
    assert head.text
    url = f"{URL}/{request_id}?stream=true"
    response = await gateway.http.get(url, headers={"Last-Event-ID": offset})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_two_different_offsets_are_refused(gateway: Gateway) -> None:
    request_id, _ = await create(gateway, tokens=PIECES[:3])
    url = f"{URL}/{request_id}?stream=true&after=1-1"
    clash = await gateway.http.get(url, headers={"Last-Event-ID": "1-2"})
    assert (clash.status_code, clash.json()["error"]["code"]) == (400, "invalid_offset")
    same = await gateway.http.get(url, headers={"Last-Event-ID": "1-1"})
    assert same.status_code == 200


async def test_foreign_and_unknown_requests_look_the_same(gateway: Gateway) -> None:
    request_id, _ = await create(gateway, tokens=PIECES[:3])
    unknown = "chatcmpl-" + "0" * 32
    answers = []
    for name in (request_id, unknown, "chatcmpl-nothere", "x"):
        for method, url in (
            ("GET", f"{URL}/{name}?stream=true"),
            ("GET", f"{URL}/{name}"),
            ("POST", f"{URL}/{name}/cancel"),
        ):
            response = await gateway.http.request(method, url, headers=FOREIGN)
            answers.append((response.status_code, response.content))
            assert response.headers["x-request-id"] != name
    assert set(answers) == {(404, answers[0][1])}


async def test_e4_an_expired_stream_is_410_and_starts_nothing(gateway: Gateway, redis_url: str) -> None:
    body = {"model": "default", "messages": script(), "conversation_id": "talk"}
    request_id = (await gateway.http.post(URL, json=body)).json()["id"]
    client = connect(gateway.role._settings.redis)
    await client.delete(stream_key(request_id))
    await client.aclose()
    for query in ("", "?stream=true", "?stream=true&after=1-1"):
        gone = await gateway.http.get(f"{URL}/{request_id}{query}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (410, "stream_expired")
        assert "'talk'" in gone.json()["error"]["message"]
    assert list(gateway.double.records) == [request_id]


async def test_a_finished_reply_is_read_again_as_json(gateway: Gateway) -> None:
    body = {"model": "default", "messages": script(tokens=PIECES)}
    first = await gateway.http.post(URL, json=body)
    again = await gateway.http.get(f"{URL}/{first.json()['id']}")
    assert again.json() == first.json()


async def test_d8_cancel_by_id_ends_the_stream_for_every_reader(gateway: Gateway) -> None:
    request_id, head = await create(gateway, stop_at=2, tokens=PIECES, hold_before=5)
    reading = asyncio.create_task(resume(gateway, request_id))
    whole = asyncio.create_task(gateway.http.get(f"{URL}/{request_id}"))
    answer = await gateway.http.post(f"{URL}/{request_id}/cancel")
    assert answer.json()["status"] == "cancelled"
    events = await reading
    assert events.text.startswith(head.text)
    assert "".join(PIECES[:5]).startswith(events.text)
    assert events.error is not None
    assert events.error["code"] == "cancelled"
    assert ((await whole).status_code, (await whole).json()["error"]["code"]) == (499, "cancelled")
    assert (await gateway.http.post(f"{URL}/{request_id}/cancel")).json()["status"] == "cancelled"
    finished, _ = await create(gateway, tokens=["a"])
    assert (await gateway.http.post(f"{URL}/{finished}/cancel")).json()["status"] == "completed"


async def test_one_stop_ends_the_request_it_names_with_all_its_choices_and_no_other_D7(
    gateway: Gateway,
) -> None:
    ids = [(await create(gateway, stop_at=1, tokens=PIECES, hold_before=2))[0] for _ in range(2)]
    body = {"model": "default", "messages": script(tokens=PIECES, hold_before=2), "n": 3, "stream": True}
    async with gateway.http.stream("POST", URL, json=body) as response:
        several = response.headers["x-request-id"]
        await read_events(response, 1)
    reading = [asyncio.create_task(resume(gateway, i)) for i in (*ids, several)]
    for stopped in (ids[0], several):
        answer = (await gateway.http.post(f"{URL}/{stopped}/cancel")).json()
        assert (answer["id"], answer["status"]) == (stopped, "cancelled")
    gateway.double.release()
    ended, other, choices = await asyncio.gather(*reading)
    assert ended.error is not None
    assert choices.error is not None
    assert {ended.error["code"], choices.error["code"]} == {"cancelled"}
    assert (other.text, other.finish) == (TEXT, "stop")


async def test_a_finished_reply_can_be_read_whole_until_it_has_expired_and_never_in_between_E11_E4(
    settings: Callable[..., Settings],
) -> None:
    """Asked without a break from its end on: first it is all there, then 410, nothing else."""
    async with running_gateway(settings(streams={"retention_seconds": 2})) as gateway:
        request_id, _ = await create(gateway, tokens=PIECES)
        answers: list[str] = []
        async with asyncio.timeout(15):
            while "expired" not in answers:
                query = {"stream": "true", "after": "1-10"}
                response = await gateway.http.get(f"{URL}/{request_id}", params=query)
                if response.status_code == 410:
                    assert response.json()["error"]["code"] == "stream_expired"
                    answers.append("expired")
                    continue
                events = Events()
                for line in response.text.splitlines():
                    events.line(line)
                if events.error is not None:
                    # Expired between the check of its owner and the reading.
                    assert events.error["code"] == "stream_lost"
                    continue
                assert (response.status_code, events.text) == (200, "".join(PIECES[10:]))
                assert (events.done, events.finish) == (True, "stop")
                answers.append("whole")
        assert answers.count("whole") > 3
        assert len(gateway.double.records) == 1, "nothing was started again"


async def test_f8_streams_are_never_compressed_nor_cached(gateway: Gateway) -> None:
    body = {"model": "default", "messages": script(), "stream": True}
    response = await gateway.http.post(URL, json=body, headers={"Accept-Encoding": "gzip"})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers
    assert "content-length" not in response.headers


async def test_a_client_that_leaves_releases_its_reader(gateway: Gateway) -> None:
    for stop_at in (0, 3):
        request_id, _ = await create(gateway, stop_at=stop_at, tokens=PIECES, hold_before=5)

        async def closed() -> bool:
            return not gateway.role._replies.count and not gateway.role._hub._feeds

        await eventually(closed, "the reader is released")
        assert await gateway.streams.last_ids([request_id]) != [SEAL]


async def test_f1_a_client_that_never_reads_is_dropped(gateway: Gateway) -> None:
    play = script(tokens=["x" * 60_000], repeat=400)
    body = orjson.dumps({"model": "default", "messages": play, "stream": True})
    head = (
        f"POST {URL} HTTP/1.1\r\nHost: x\r\nAuthorization: {gateway.http.headers['authorization']}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.role.port, limit=1024)
    writer.write(head.encode() + body)
    await reader.readline()

    async def opened() -> bool:
        return gateway.role._replies.count == 1

    async def closed() -> bool:
        return not gateway.role._replies.count

    await eventually(opened, "the reply is open")
    await eventually(closed, "the kernel gives the connection up", 30)
    writer.transport.abort()
