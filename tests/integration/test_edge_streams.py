"""Reading replies over real websockets: whole, resumed, shared, ended, expired."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from contracts.entries import Terminal
from contracts.errors import ErrorCode, error_body
from contracts.stream_ids import SEAL
from contracts.tiers import Status
from infra.stream_redis import stream_key
from tests.attempts import start_attempt
from tests.edge_kit import EdgeRig, edge_rig

PIECES = [f"{n}é👩‍💻\u2028 " for n in range(1, 301)]
WHOLE = "".join(PIECES)


@pytest.fixture
async def rig(redis_url: str) -> AsyncIterator[EdgeRig]:
    async with edge_rig(redis_url) as found:
        yield found


async def test_a_created_chat_is_read_from_its_start_e14(rig: EdgeRig) -> None:
    async with rig.client() as client:
        await client.send("chat.create", ref="r1", body={"messages": ["x"]})
        accepted = await client.recv()
        assert (accepted["type"], accepted["ref"]) == ("chat.accepted", "r1")
        rid = accepted["request_id"]
        await rig.begin(rid)
        await rig.write(rid, ["Hel", "lo"])
        await rig.finish(rid)
        frames = [await client.recv() for _ in range(6)]
    assert [f.get("status") or f.get("text") for f in frames] == [
        "accepted", "moderated", "started", "Hel", "lo", "completed",
    ]  # fmt: skip
    assert [f["offset"] for f in frames] == ["0-1", "0-2", "1-0", "1-1", "1-2", str(SEAL)]
    assert frames[-1]["finish_reason"] == "stop"
    assert frames[-1]["error"] is None
    assert {k: frames[-1]["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8,
    }  # fmt: skip


async def test_a_refused_body_is_an_error_with_its_ref(rig: EdgeRig) -> None:
    async with rig.client() as client:
        await client.send("chat.create", ref="r2", body={"messages": []})
        frame = await client.recv()
    assert (frame["type"], frame["ref"], frame["request_id"]) == ("error", "r2", None)
    assert frame["error"]["param"] == "messages"


async def test_a_slow_acceptance_does_not_hold_up_the_socket(rig: EdgeRig) -> None:
    rid = await rig.whole(["x"])
    rig.intake.gate.clear()
    async with rig.client() as client:
        await client.send("chat.create", ref="slow", body={"messages": ["x"]})
        assert await client.pong() == []
        await client.subscribe(rid)
        assert (await client.text_to())[0] == "x"
        rig.intake.gate.set()
        assert (await client.recv())["ref"] == "slow"


async def test_text_is_whole_after_cuts_at_any_offsets_e1(rig: EdgeRig) -> None:
    rid = await rig.opened()
    await rig.begin(rid)
    chosen = random.Random(7)
    words, after, written, ended = "", None, 0, False
    while not ended:
        if written < 300:
            size = chosen.randint(1, 60)
            await rig.write(rid, PIECES[written : written + size], first=written + 1)
            written = min(300, written + size)
            if written == 300:
                await rig.finish(rid)
        async with rig.client() as client:
            await client.subscribe(rid, after)
            some, offset, end = await client.text_to(chosen.randint(1, 20))
            words += some
            after = offset or after
            ended = end is not None
    assert words == WHOLE


@pytest.mark.parametrize("after", ["1-300", "1-299", "1-0", "0-1", "0-0", None, str(SEAL)])
async def test_a_resume_of_a_finished_reply_gives_exactly_the_rest_e11(
    rig: EdgeRig, after: str | None
) -> None:
    rid = await rig.whole(PIECES)
    async with rig.client() as client:
        await client.subscribe(rid, after)
        words, _, end = await client.text_to()
        seen = int(after.split("-")[1]) if after and after.startswith("1-") else 0
        assert words == ("" if after == str(SEAL) else "".join(PIECES[seen:]))
        assert end is not None
        assert end["status"] == "completed"
        await client.subscribe(rid)
        assert (await client.text_to())[0] == WHOLE, "an ended stream is replayed when asked for again"


@pytest.mark.parametrize(
    ("after", "code"),
    [
        ("-1", "invalid_offset"),
        ("abc", "invalid_offset"),
        ("$", "invalid_offset"),
        ("0", "invalid_offset"),
        ("", "invalid_offset"),
        ("1-1-1", "invalid_offset"),
        ("01-1", "invalid_offset"),
        ("1-" + "1" * 10_000, "invalid_offset"),
        ("9999999999999-0", "offset_ahead"),
        (str(SEAL), "offset_ahead"),
        ("1-6", "offset_ahead"),
        ("0-3", "invalid_offset"),
        ("18446744073709551616-0", "invalid_offset"),
    ],
)
async def test_an_offset_of_no_entry_is_refused_before_anything_is_read_e5(
    rig: EdgeRig, after: str, code: str
) -> None:
    rid = await rig.opened()
    await rig.begin(rid)
    await rig.write(rid, ["a"] * 5)
    async with rig.client() as client:
        await client.subscribe(rid, after)
        frame = await client.recv()
        assert (frame["type"], frame["request_id"], frame["error"]["code"]) == ("error", rid, code)
        assert await client.pong() == []
        await client.subscribe(rid, "1-4")
        assert (await client.recv())["offset"] == "1-5"


async def test_a_second_subscribe_repeats_nothing_and_tabs_are_independent_e8(rig: EdgeRig) -> None:
    rid = await rig.opened()
    await rig.begin(rid)
    await rig.write(rid, PIECES[:10])
    async with rig.client() as tab1, rig.client() as tab2:
        await tab1.subscribe(rid)
        first, offset, _ = await tab1.text_to(10)
        await tab1.subscribe(rid)
        await tab1.subscribe(rid, "1-2")
        await tab2.subscribe(rid, "1-6")
        assert (await tab2.text_to(4))[0] == "".join(PIECES[6:10])
        assert await tab1.pong() == []
        await rig.write(rid, PIECES[10:12], first=11)
        await rig.finish(rid)
        assert first + (await tab1.text_to())[0] == "".join(PIECES[:12])
        assert (await tab2.text_to())[0] == "".join(PIECES[10:12])
        assert offset == "1-10"


async def test_unsubscribe_stops_the_frames_and_a_resume_goes_on(rig: EdgeRig) -> None:
    rid = await rig.opened()
    await rig.begin(rid)
    async with rig.client() as client:
        await client.subscribe(rid, "1-0")
        await rig.write(rid, ["a"])
        assert (await client.text_to(1))[0] == "a"
        await client.send("stream.unsubscribe", request_id=rid)
        await client.send("stream.unsubscribe", request_id=rid)
        assert await client.pong() == []
        await rig.write(rid, ["b"], first=2)
        await rig.finish(rid)
        assert await client.pong() == []
        await client.subscribe(rid, "1-1")
        words, _, end = await client.text_to()
        assert (words, end is not None) == ("b", True)


async def test_foreign_and_unknown_requests_look_the_same(rig: EdgeRig) -> None:
    rid = await rig.whole(["secret"])
    found = []
    async with rig.client("sk-you") as client:
        for request_id in (rid, "chatcmpl-" + "0" * 32, "chatcmpl-nothere", "", "x" * 100):
            for kind in ("stream.subscribe", "chat.cancel"):
                await client.send(kind, request_id=request_id)
                frame = await client.recv()
                assert frame.pop("request_id") == request_id
                found.append(frame)
    assert all(frame == found[0] for frame in found)
    assert found[0]["error"]["code"] == "not_found"


async def test_an_expired_stream_is_said_to_have_expired_e4(redis_url: str) -> None:
    async with edge_rig(redis_url, streams={"retention_seconds": 1}) as rig:
        rid = await rig.whole(["x"])
        async with rig.client() as client:
            await client.subscribe(rid, "1-1")
            assert (await client.text_to())[2] is not None
            await rig.redis.delete(stream_key(rid))
            for after in ("1-1", None, str(SEAL), "0-0"):
                await client.subscribe(rid, after)
                assert await client.error() == "stream_expired"
        assert await rig.redis.exists(stream_key(rid)) == 0, "a resume creates nothing"


async def test_a_stream_that_vanishes_while_it_is_read_is_an_error_e10(rig: EdgeRig) -> None:
    rid = await rig.opened()
    async with rig.client() as client:
        await client.subscribe(rid)
        assert (await client.recv())["status"] == "accepted"
        await rig.redis.flushdb()
        frame = await client.recv()
        assert (frame["type"], frame["request_id"], frame["error"]["code"]) == (
            "error",
            rid,
            "stream_lost",
        )
        await client.subscribe(rid, "0-1")
        assert await client.error() == "not_found"


async def test_cancel_ends_the_stream_once_on_the_socket_that_reads_it_d8(rig: EdgeRig) -> None:
    rid = await rig.opened()
    await rig.begin(rid)
    await rig.write(rid, ["a", "b"])
    async with rig.client() as reads, rig.client() as other:
        await reads.subscribe(rid)
        await reads.text_to(2)
        await other.send("chat.cancel", request_id=rid)
        elsewhere = await other.recv()
        await reads.send("chat.cancel", request_id=rid)
        here = await reads.recv()
        assert here == elsewhere
        assert (here["type"], here["status"], here["offset"]) == ("stream.end", "cancelled", str(SEAL))
        assert here["usage"]["completion_tokens"] == 2, "what the stream shows was produced"
        assert here["error"]["code"] == "cancelled"
        assert here["finish_reason"] is None
        extra = await reads.pong()
        assert all(frame == here for frame in extra)


async def test_cancel_on_the_reading_socket_alone_brings_one_end(rig: EdgeRig) -> None:
    rid = await rig.opened()
    async with rig.client() as client:
        await client.subscribe(rid)
        await client.recv()
        await client.send("chat.cancel", request_id=rid)
        assert (await client.recv())["status"] == "cancelled"
        assert await client.pong() == []


async def test_a_failure_is_told_at_every_resume_b7(rig: EdgeRig) -> None:
    rid = await rig.opened()
    await rig.begin(rid)
    await rig.write(rid, PIECES[:5])
    error = error_body(ErrorCode.ENGINE_ERROR, "The engine failed.")
    await rig.streams.seal(rid, Terminal(status=Status.FAILED, error=error))
    async with rig.client() as client:
        for after, seen in (("1-3", 3), ("1-5", 5), (None, 0)):
            await client.subscribe(rid, after)
            words, _, end = await client.text_to()
            assert words == "".join(PIECES[seen:5])
            assert end is not None
            assert (end["status"], end["error"]) == ("failed", error.model_dump())


async def test_a_takeover_shows_as_resumed_and_the_text_goes_on(rig: EdgeRig) -> None:
    rid = await rig.opened()
    await rig.begin(rid)
    async with rig.client() as client:
        await client.subscribe(rid, "1-0")
        await rig.write(rid, ["a", "b"])
        await start_attempt(rig.streams, rid, 2, "v")
        await rig.write(rid, ["c"], first=3, attempt=2)
        await rig.finish(rid)
        frames = [await client.recv() for _ in range(5)]
    assert [f.get("text") or f["status"] for f in frames] == ["a", "b", "resumed", "c", "completed"]


async def test_many_streams_share_one_socket(rig: EdgeRig) -> None:
    rids = [await rig.opened() for _ in range(40)]
    async with rig.client() as client:
        for rid in rids:
            await client.subscribe(rid, "0-1")
        for n in range(1, 11):
            await rig.streams.append([])
            for rid in rids:
                await rig.write(rid, [f"{n} "], first=n)
        for rid in rids:
            await rig.finish(rid)
        words = dict.fromkeys(rids, "")
        ends = 0
        while ends < 40:
            frame = await client.recv()
            if frame["type"] == "stream.end":
                ends += 1
            else:
                words[frame["request_id"]] += frame["text"]
    assert set(words.values()) == {"".join(f"{n} " for n in range(1, 11))}
