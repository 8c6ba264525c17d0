"""Server-sent events as OpenAI's chat API and its clients have them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.entries import Accepted, Dispatched, Moderated, Started, StreamEntry, Terminal, Text
from contracts.errors import ErrorBody, ErrorCode, error_body
from contracts.records import Usage
from contracts.stream_ids import ACCEPTED, DISPATCHED, MODERATED, SEAL, START, StreamId
from contracts.tiers import FinishReason, Status
from contracts.token_stream import StreamsUnavailable
from streaming_edge.errors import StreamLost
from streaming_edge.sse import KEEPALIVE, ChatChunkEncoder, sse_body

RID = "chatcmpl-" + "0" * 32
USAGE = Usage(prompt_tokens=7, completion_tokens=3)
PROGRESS = [
    StreamEntry(ACCEPTED, Accepted(tenant="t", tier="paid", model="m", created_ms=5)),
    StreamEntry(MODERATED, Moderated(prompt_tokens=7)),
    StreamEntry(DISPATCHED, Dispatched(worker_id="w")),
    StreamEntry(StreamId(1, 0), Started(worker_id="w", model_revision="1")),
]


def text(n: int, words: str, index: int = 0, **kw: Any) -> StreamEntry:
    return StreamEntry(StreamId(1, n), Text(words, (n,), index, **kw))


def end(status: Status = Status.COMPLETED, **kw: Any) -> StreamEntry:
    if status is Status.COMPLETED:
        kw = {"finish_reasons": [FinishReason.STOP], "usage": USAGE} | kw
    return StreamEntry(SEAL, Terminal(status=status, **kw))


def encoder(after: StreamId = START, usage: bool = False, **kw: Any) -> ChatChunkEncoder:
    return ChatChunkEncoder(RID, "m", 5, usage, after, **kw)


def events(raw: bytes) -> list[tuple[str | None, Any]]:
    """(id, data) of each event, by the SSE specification's own rules."""
    found, entry_id, data = [], None, []
    for line in raw.decode().split("\n"):
        if line == "":
            if data:
                body = "\n".join(data)
                found.append((entry_id, body if body == "[DONE]" else json.loads(body)))
            data = []
        elif line.startswith("data: "):
            data.append(line[6:])
        elif line.startswith("id: "):
            entry_id = line[4:]
        else:
            assert line.startswith(":"), line
    assert not data, "the last event is complete"
    return found


class Given:
    """A subscription that gives these batches; an exception among them is raised."""

    def __init__(self, batches: list[list[StreamEntry] | Exception]) -> None:
        self.batches = batches
        self.ended = False

    async def next(self, timeout_seconds: float) -> list[StreamEntry]:
        batch = self.batches.pop(0)
        if isinstance(batch, Exception):
            raise batch
        self.ended = bool(batch) and batch[-1].id.is_seal
        return batch


REPLY = [*PROGRESS, text(1, "Hel"), text(2, "lo"), text(3, "!"), end()]


def deltas(found: list[tuple[str | None, Any]]) -> str:
    return "".join(
        c["delta"].get("content", "") for _, d in found if d != "[DONE]" for c in d.get("choices", [])
    )


def test_a_reply_has_one_role_chunk_its_text_one_finish_chunk_and_done() -> None:
    found = events(encoder().encode(REPLY))
    choices = [d["choices"][0] for _, d in found[:-1]]
    assert [c["delta"] for c in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {"content": "!"},
        {},
    ]
    assert [c["finish_reason"] for c in choices] == [None] * 4 + ["stop"]
    assert found[-1] == ("18446744073709551615-18446744073709551615", "[DONE]")
    first = found[0][1]
    assert (first["id"], first["object"], first["created"], first["model"]) == (
        RID, "chat.completion.chunk", 5, "m",
    )  # fmt: skip
    assert "usage" not in first


def test_usage_comes_once_in_a_last_chunk_without_choices_b1() -> None:
    found = events(encoder(usage=True).encode(REPLY))
    *chunks, last = [d for _, d in found if d != "[DONE]"]
    assert all(c["usage"] is None and len(c["choices"]) == 1 for c in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 10
    assert last["usage"]["prompt_tokens"] == 7


def test_usage_follows_from_the_stream_where_the_seal_states_none() -> None:
    found = events(encoder(usage=True).encode([*REPLY[:-1], end(usage=None)]))
    assert found[-2][1]["usage"]["completion_tokens"] == 3
    assert found[-2][1]["usage"]["prompt_tokens"] == 7


def test_each_choice_has_its_own_role_and_exactly_one_finish_b4() -> None:
    reasons = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]
    items = [text(1, "a", 2), text(2, "b", 0), text(3, "c", 2), end(finish_reasons=reasons)]
    found = [d for _, d in events(encoder().encode(items)) if d != "[DONE]"]
    by_index: dict[int, list[Any]] = {}
    for chunk in found:
        by_index.setdefault(chunk["choices"][0]["index"], []).append(chunk["choices"][0])
    assert sorted(by_index) == [0, 1, 2]
    for index, chunks in by_index.items():
        assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == [reasons[index]]


def test_an_empty_answer_still_has_a_finish_chunk_b5() -> None:
    found = events(encoder().encode([*PROGRESS, end()]))
    assert [d["choices"][0]["finish_reason"] for _, d in found[:-1]] == [None, "stop"]
    assert found[-1][1] == "[DONE]"


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.COMPLETED])
def test_any_other_end_is_an_error_event_and_nothing_after_it_b7(status: Status) -> None:
    found = events(encoder().encode([*PROGRESS, text(1, "part"), end(status)]))
    entry_id, last = found[-1]
    assert set(last) == {"error"}
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert entry_id == "1-1", "a resume after it gives the error again"
    assert not any(d == "[DONE]" or d.get("choices", [{}])[0].get("finish_reason") for _, d in found)


def test_the_error_of_the_seal_is_the_one_told() -> None:
    body = error_body(ErrorCode.WORKER_LOST, "gone")
    found = events(encoder().encode([end(Status.FAILED, error=body)]))
    assert found == [(None, {"error": body.model_dump()})]


@given(st.integers(0, len(REPLY)), st.booleans())
def test_a_resume_after_any_event_gives_exactly_the_rest_e1(cut: int, usage: bool) -> None:
    whole = events(encoder(usage=usage).encode(REPLY))
    cut = min(cut, len(whole))
    seen, last_id = whole[:cut], (whole[cut - 1][0] if cut else None)
    after = StreamId.parse(last_id) if last_id else START
    rest = [e for e in REPLY if e.id > after] if not after.is_seal else [REPLY[-1]]
    again = events(encoder(after, usage=usage).encode(rest))
    assert deltas(seen) + deltas(again) == "Hello!"
    assert again[-1][1] == "[DONE]"
    finishes = [c for _, d in again if d != "[DONE]" for c in d["choices"] if c["finish_reason"]]
    assert len(finishes) == (0 if after.is_seal else 1)


def test_a_resume_inside_the_text_repeats_no_role_chunk() -> None:
    found = events(encoder(StreamId(1, 2)).encode([text(3, "!"), end()]))
    assert found[0] == ("1-3", found[0][1])
    assert not any("role" in c["delta"] for _, d in found[:-1] for c in d["choices"])


def test_a_resume_after_a_takeover_knows_the_choices_that_have_begun() -> None:
    item = StreamEntry(StreamId(2, 4), Text("x"))
    fresh = events(encoder(StreamId(2, 0), begun=frozenset()).encode([item]))
    known = events(encoder(StreamId(2, 0), begun=frozenset({0})).encode([item]))
    assert [len(fresh), len(known)] == [2, 1]


def test_line_separators_of_unicode_are_escaped_a10() -> None:
    words = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1c"
    raw = encoder().encode([text(1, words, logprobs=({"token": words, "logprob": -1.0},))])
    assert len(raw.decode().splitlines()) == len(raw.split(b"\n")) - 1
    chunk = events(raw)[-1][1]["choices"][0]
    assert chunk["delta"]["content"] == words
    assert chunk["logprobs"]["content"][0]["token"] == words


@given(st.text())
def test_any_text_survives(words: str) -> None:
    assert deltas(events(encoder().encode([text(1, words)]))) == words


async def collect(body: AsyncIterator[bytes]) -> list[bytes]:
    return [part async for part in body]


async def test_waits_send_keepalives_and_a_batch_is_one_write() -> None:
    parts = await collect(sse_body(Given([[], REPLY[:6], [], REPLY[6:]]), encoder(), 1.0))
    assert parts[0] == parts[2] == KEEPALIVE
    assert len(parts) == 4
    assert deltas(events(b"".join(parts))) == "Hello!"


@pytest.mark.parametrize(
    ("failure", "code"),
    [(StreamLost(RID), "stream_lost"), (StreamsUnavailable("x"), "service_unavailable")],
)
async def test_a_reading_that_breaks_ends_with_an_error_event_e10(failure: Exception, code: str) -> None:
    parts = await collect(sse_body(Given([REPLY[:5], failure]), encoder(), 1.0))
    assert events(b"".join(parts))[-1][1]["error"]["code"] == code


def client_of(parts: list[bytes]) -> openai.AsyncOpenAI:
    async def stream() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=stream())

    transport = httpx2.MockTransport(answer)
    return openai.AsyncOpenAI(
        api_key="sk-x", base_url="http://x/v1", http_client=httpx2.AsyncClient(transport=transport)
    )


async def through_openai(parts: list[bytes]) -> tuple[str, list[str | None]]:
    stream = await client_of(parts).chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x"}], stream=True
    )
    words, finishes = "", []
    async for chunk in stream:
        for choice in chunk.choices:
            words += choice.delta.content or ""
            finishes.append(choice.finish_reason)
    return words, finishes


async def test_the_official_client_gets_through_ids_comments_and_keepalives_f7() -> None:
    one = encoder(usage=True)
    parts = [KEEPALIVE]
    for item in REPLY:
        parts += [one.encode([item]), KEEPALIVE, KEEPALIVE]
    words, finishes = await through_openai(parts)
    assert words == "Hello!"
    assert [f for f in finishes if f] == ["stop"]


@pytest.mark.parametrize("status", [Status.FAILED, Status.CANCELLED, Status.EXPIRED, Status.REFUSED])
async def test_the_official_client_raises_on_any_end_but_completion_b7(status: Status) -> None:
    parts = [encoder().encode([*REPLY[:5], end(status)])]
    with pytest.raises(openai.APIError) as raised:
        await through_openai(parts)
    assert isinstance(raised.value.body, dict)
    assert ErrorBody.model_validate(raised.value.body).code


def test_chunks_name_the_model_that_the_request_was_accepted_for() -> None:
    """Under overload, or after an idempotent repeat, that is another than the call's."""
    other = Accepted(tenant="t", tier="free", model="small", created_ms=5)
    raw = encoder(usage=True).encode([StreamEntry(ACCEPTED, other), *PROGRESS[1:], text(1, "a"), end()])
    chunks = [data for _, data in events(raw) if data != "[DONE]"]
    assert len(chunks) == 4
    assert {chunk["model"] for chunk in chunks} == {"small"}
