"""``headrace play``: the real edge and the gateway's chat routes over recordings, as front ends meet them."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI
from websockets.asyncio.client import connect as ws_connect
from websockets.exceptions import InvalidStatus

from contracts.stream_ids import SEAL
from infra.cli import main
from infra.cli.play import PlayOptions, playing
from infra.replay.recordings import Recording, even, recording_object, spoken
from infra.replay.sources import RecordedTurn
from infra.settings import Settings
from tests.edge_kit import Client
from tests.unit.infra.test_recordings import PIECES, line_of, recording

KEY = "sk-front-end"
TEXT = "\n".join(f"w{n} ☃" for n in range(40))
BODY = {"model": "a-model", "messages": [{"role": "user", "content": "x"}]}


def slow(step_ms: int) -> Recording:
    """Eighty pieces, one every ``step_ms``."""
    items = spoken(RecordedTurn([], TEXT, model="a-model"))
    return Recording(recording().request_id, "even", even(items, 0, step_ms * 80))


@asynccontextmanager
async def client(settings: Settings, key: str = KEY) -> AsyncIterator[Client]:
    url = f"ws://127.0.0.1:{settings.edge.port}/v1/ws"
    headers = {"Authorization": f"Bearer {key}"}
    async with ws_connect(url, additional_headers=headers, compression=None) as connection:
        yield Client(connection)


def served(speed: float | None = 1.0) -> PlayOptions:
    return PlayOptions(KEY, speed, port=0, ws_port=0)


def api(settings: Settings, key: str = KEY) -> AsyncOpenAI:
    url = f"http://127.0.0.1:{settings.http.port}/v1"
    return AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=20)


async def test_a_socket_that_drops_in_the_middle_goes_on_at_its_offset() -> None:
    async with playing([slow(10)], served()) as settings:
        async with client(settings) as one:
            await one.send("chat.create", ref=7, body=BODY)
            accepted = await one.recv()
            assert (accepted["type"], accepted["ref"]) == ("chat.accepted", 7)
            request_id = accepted["request_id"]
            begun, offset, ended = await one.text_to(25)
            assert ended is None
            one.connection.transport.abort()
        async with client(settings) as two:
            await two.subscribe(request_id, offset)
            rest, _, ended = await two.text_to()
            assert begun + rest == TEXT
            assert ended is not None
            assert (ended["status"], ended["finish_reason"]) == ("completed", "stop")
            assert ended["usage"]["completion_tokens"] == 80
            await two.subscribe(request_id)
            assert (await two.text_to())[0] == TEXT, "as often as needed"
            await two.subscribe(request_id, "1-9999")
            assert await two.error() == "invalid_offset"


async def test_a_cancel_ends_the_reply_for_everybody_who_reads_it() -> None:
    async with playing([slow(60_000)], served()) as settings:
        rid = recording().request_id
        async with client(settings) as one, client(settings) as two:
            await one.subscribe(rid)
            await two.subscribe(rid)
            begun = [(await reader.text_to(1))[0] for reader in (one, two)]
            await two.send("stream.unsubscribe", request_id=rid)
            await two.subscribe(rid, "1-2")
            assert await two.error() == "offset_ahead", "it is in the recording, and not out yet"
            await two.subscribe(rid, "1-1")
            await two.send("chat.cancel", request_id=rid)
            ends = [await reader.text_to() for reader in (one, two)]
            for words, _, ended in ends:
                assert words == ""
                assert ended is not None
                assert (ended["status"], ended["error"]["code"]) == ("cancelled", "cancelled")
                assert ended["offset"] == str(SEAL)
            assert begun == ["w0", "w0"]
            await one.send("chat.cancel", request_id=rid)
            assert (await one.recv())["status"] == "cancelled", "again, and it stays so"


async def test_a_front_end_s_mistakes_are_answered_as_by_the_real_edge() -> None:
    async with playing([slow(0)], served()) as settings:
        with pytest.raises(InvalidStatus) as refused:
            async with client(settings, "sk-other"):
                pass
        assert refused.value.response.status_code == 401
        async with client(settings) as one:
            await one.send("chat.create", body={"model": "a-model", "messages": []})
            assert await one.error() == "invalid_value"
            await one.send("chat.create", body=BODY | {"model": "other"})
            assert await one.error() == "model_not_found"
            await one.send("chat.cancel", request_id="chatcmpl-" + "0" * 32)
            assert await one.error() == "not_found"
            await one.send("nonsense")
            assert await one.error() == "invalid_frame"


async def test_the_official_client_streams_resumes_and_cancels() -> None:
    async with playing([slow(10)], served()) as settings, api(settings) as openai:
        stream = await openai.chat.completions.create(**BODY, stream=True)  # type: ignore[call-overload]
        words, request_id = "", ""
        async for chunk in stream:
            request_id = chunk.id
            words += chunk.choices[0].delta.content or ""
            if len(words) > 60:
                break
        await stream.close()
        async with httpx.AsyncClient(base_url=str(openai.base_url), timeout=20) as http:
            headers = {"Authorization": f"Bearer {KEY}", "Last-Event-ID": "1-1"}
            url = f"/chat/completions/{request_id}"
            answer = await http.get(f"{url}?stream=true", headers=headers)
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            rest = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
            assert events[-1] == "[DONE]"
            assert "w0" + "".join(rest) == TEXT
            done = await http.post(f"{url}/cancel", headers=headers)
            assert done.json()["status"] == "completed"
            assert (await http.get("/models", headers=headers)).json()["data"][-1]["id"] == "a-model"
            assert "<html" in (await http.get(f"http://127.0.0.1:{settings.http.port}/")).text
        whole = await openai.chat.completions.create(**BODY)  # type: ignore[call-overload]
        assert whole.choices[0].message.content == TEXT
        with pytest.raises(APIStatusError) as refused:
            await api(settings, "sk-other").models.list()
        assert refused.value.status_code == 401


async def test_all_at_once_in_the_order_of_the_file_and_from_the_first_again() -> None:
    async with playing([slow(60_000), recording()], served(None)) as settings, client(settings) as one:
        for words in (TEXT, "".join(PIECES), TEXT):
            await one.send("chat.create", body=BODY)
            await one.recv()
            assert (await one.text_to())[0] == words


async def test_a_file_with_a_hole_is_played_to_it_until_somebody_stops(tmp_path: Path) -> None:
    file = tmp_path / "recordings.jsonl"
    entries = [entry for entry in recording_object(recording())["entries"] if entry["id"] != "1-3"]
    file.write_text(line_of(recording(), entries=entries) + "\n" + line_of(recording())[:50])
    options = ["--speed", "max", "--redact", "--port", "0", "--ws-port", "0", "--key", KEY]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "infra.cli", "play", str(file), *options, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    async with asyncio.timeout(30):
        told = (await process.stderr.readuntil(b"stops\n")).decode()
        assert "1 entries cannot be played, 1 replies are not complete" in told
        url = told[told.index("ws://") : told.index(";")]
        async with ws_connect(url, additional_headers={"Authorization": f"Bearer {KEY}"}) as socket:
            one = Client(socket)
            await one.send("chat.create", body=BODY | {"model": "m"})
            await one.recv()
            words, _, ended = await one.text_to()
            assert words == "xxxxx xxx"
            assert ended is not None
            assert (ended["status"], ended["error"]["code"]) == ("failed", "stream_lost")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0


def test_what_cannot_be_played_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert main(["play", str(empty)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("headrace: ")
    assert told.count("\n") == 1
