"""A worker process alone: real Kafka, real Redis, the simulated engine; dispatched to by hand."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.entries import Started, Terminal, Text
from contracts.errors import ErrorCode
from contracts.reply import Reply
from contracts.stream_ids import SEAL, StreamId
from contracts.tiers import FinishReason, Status
from contracts.token_stream import Appended
from infra.presence_redis import ReaderPresence
from infra.settings import Settings
from tests.integration.worker_bench import WorkerBench, eventually, worker_bench
from workers.sim_script import parse_script
from workers.sim_text import FIRST_PIECE, SimDetokenizer, reply_base, word_id

EMOJI = "👩‍💻 你好 ďábel 🇨🇿"
SCRIPT: list[dict[str, Any]] = [
    {"match": "[[emoji]]", "utf8": EMOJI, "then": "eos"},
    {"match": "[[half]]", "pieces": ["ok ", {"hex": "f09f"}, {"hex": "91"}]},
    {"match": "[[invalid]]", "pieces": [{"hex": "e4"}, " ok", {"hex": "80"}, "!"], "then": "eos"},
    {"match": "[[tool]]", "pieces": ["He", "llo <to", "ol", "EN", "D", " more"]},
    {"match": "[[fail]]", "raise_at": 5},
    {"match": "[[refuse]]", "raise_at": 0, "client_fault": True},
    {"match": "[[die]]", "dead_at": 3, "attempt": 1},
    {"match": "[[hang]]", "hang_at": 3, "attempt": 1},
    {"match": "[[prefill]]", "ttft_ms": 60_000, "attempt": 1},
]
PIECES = parse_script(json.dumps({"replies": SCRIPT})).pieces

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
async def bench(settings: Callable[..., Settings], tmp_path: Path) -> AsyncIterator[WorkerBench]:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"replies": SCRIPT}))
    configured = settings(
        streams={"lease_ms": 600},
        worker={
            "engine": "sim",
            "max_seqs": 32,
            "heartbeat_ms": 100,
            "hang_seconds": 1.0,
            "drain_seconds": 10,
            "sim": {"ttft_ms": 5, "tpot_ms": 5, "slowdown_per_request": 0, "script": str(script)},
        },
    )
    async with worker_bench(configured, tmp_path) as found:
        yield found


def expected_text(bench: WorkerBench, text: str, count: int, seed: int | None = None) -> str:
    base = reply_base(bench.record("chatcmpl-" + "0" * 32, text).prompt_token_ids, seed, 0)
    detokenizer = SimDetokenizer(())
    return "".join(detokenizer.push(word_id(base, i)) for i in range(count))


async def test_many_replies_at_once_fill_their_streams_and_end(bench: WorkerBench) -> None:
    worker = await bench.start_worker()
    rids = [await bench.accept() for _ in range(20)]
    for i, rid in enumerate(rids):
        await bench.dispatch(worker, bench.record(rid, f"prompt {i}", max_tokens=30))
    for i, rid in enumerate(rids):
        items = await bench.streams.read_all(rid)
        items = items if items[-1].id == SEAL else (await _sealed_items(bench, rid))
        reply = Reply().extend(items)
        assert reply.terminal is not None
        assert reply.terminal.status is Status.COMPLETED
        assert reply.terminal.finish_reasons == [FinishReason.LENGTH]
        assert reply.terminal.usage is not None
        assert reply.terminal.usage.completion_tokens == 30
        assert reply.choices[0].text == expected_text(bench, f"prompt {i}", 30)
        texts = [item for item in items if isinstance(item.entry, Text)]
        assert texts[-1].id == StreamId(1, 30)
        assert isinstance(items[3].entry, Started)
        assert items[3].id == StreamId(1, 0)
    outcomes = await bench.outcomes(*rids)
    for i, rid in enumerate(rids):
        assert outcomes[rid].choices[0].text == expected_text(bench, f"prompt {i}", 30)
        assert outcomes[rid].usage.completion_tokens == 30
        assert outcomes[rid].ttft_ms is not None


async def _sealed_items(bench: WorkerBench, rid: str) -> Any:
    await bench.sealed(rid)
    return await bench.streams.read_all(rid)


async def test_the_same_request_elsewhere_gives_the_same_text(bench: WorkerBench) -> None:
    first, second = await bench.start_worker(), await bench.start_worker()
    assert first.slot != second.slot
    texts = [(await bench.generate(w, "same", seed=7)).choices[0].text for w in (first, second)]
    assert texts[0] == texts[1] == expected_text(bench, "same", 20, seed=7)


async def test_whole_characters_and_no_leaks_reach_the_stream_A1_A2_A4_A8(bench: WorkerBench) -> None:
    worker = await bench.start_worker()
    emoji = await bench.generate(worker, "[[emoji]]", max_tokens=200)
    assert emoji.choices[0].text == EMOJI
    assert emoji.terminal is not None
    assert emoji.terminal.finish_reasons == [FinishReason.STOP]
    half = await bench.generate(worker, "[[half]]", max_tokens=3)
    assert half.choices[0].text == "ok "
    assert half.terminal is not None
    assert half.terminal.usage is not None
    assert half.terminal.usage.completion_tokens == 3
    assert half.terminal.finish_reasons == [FinishReason.LENGTH]
    invalid = await bench.generate(worker, "[[invalid]]")
    assert invalid.choices[0].text == "\ufffd ok\ufffd!"
    tool = await bench.generate(worker, "[[tool]]", stop=["END"])
    assert tool.choices[0].text == "Hello <tool"
    assert tool.terminal is not None
    assert tool.terminal.finish_reasons == [FinishReason.STOP]


async def test_each_choice_has_its_text_and_one_finish_B4(bench: WorkerBench) -> None:
    worker = await bench.start_worker()
    rid = await bench.accept(choices=2)
    await bench.dispatch(worker, bench.record(rid, "two", n=2, max_tokens=10))
    reply = await bench.sealed(rid)
    assert reply.terminal is not None
    assert reply.terminal.finish_reasons == [FinishReason.LENGTH] * 2
    assert reply.terminal.usage is not None
    assert reply.terminal.usage.completion_tokens == 20
    assert reply.choices[0].text != reply.choices[1].text
    assert len((await bench.outcomes(rid))[rid].choices) == 2


async def test_an_engine_failure_fails_its_request_only_B7(bench: WorkerBench) -> None:
    worker = await bench.start_worker()
    rids = [await bench.accept() for _ in range(3)]
    for rid, text in zip(rids, ("fine", "[[fail]]", "[[refuse]]"), strict=True):
        await bench.dispatch(worker, bench.record(rid, text, max_tokens=50))
    fine, failed, refused = [await bench.sealed(rid) for rid in rids]
    assert fine.terminal is not None
    assert fine.terminal.status is Status.COMPLETED
    assert failed.terminal is not None
    assert failed.terminal.status is Status.FAILED
    assert failed.terminal.error is not None
    assert failed.terminal.error.code == ErrorCode.ENGINE_ERROR
    assert failed.tokens_out == 5
    assert refused.terminal is not None
    assert refused.terminal.error is not None
    assert refused.terminal.error.status == 400
    outcome = (await bench.outcomes(rids[1]))[rids[1]]
    assert outcome.status is Status.FAILED
    assert outcome.choices[0].text == failed.choices[0].text


async def test_a_cancel_stops_generation_and_keeps_what_is_out_D1(bench: WorkerBench) -> None:
    worker = await bench.start_worker()
    rid = await bench.accept()
    await bench.dispatch(worker, bench.record(rid, "long", max_tokens=5_000))
    await bench.tokens_out(rid, 10)
    assert await bench.streams.seal(rid, Terminal(status=Status.CANCELLED)) is Appended.OK
    outcome = (await bench.outcomes(rid))[rid]
    assert outcome.status is Status.CANCELLED
    assert outcome.choices[0].text == (await bench.reply(rid)).choices[0].text
    await eventually(lambda: _idle(bench, worker.worker_id), "the slot is free")


async def test_a_cancel_during_prefill_stops_at_once_D1(bench: WorkerBench) -> None:
    worker = await bench.start_worker()
    rid = await bench.accept()
    await bench.dispatch(worker, bench.record(rid, "[[prefill]]"))
    await eventually(lambda: _attempts(bench, rid, 1), "the attempt has started")
    await bench.streams.seal(rid, Terminal(status=Status.CANCELLED))
    await eventually(lambda: _idle(bench, worker.worker_id), "the slot is free")
    assert (await bench.outcomes(rid))[rid].status is Status.CANCELLED


async def _all_leave(bench: WorkerBench, rid: str) -> None:
    await ReaderPresence(bench.client).vouch("hub", [], [rid])


async def test_a_reply_that_all_readers_left_is_ended_also_in_prefill_and_with_choices_D1_D4(
    bench: WorkerBench,
) -> None:
    worker = await bench.start_worker()
    for text, sampling, tokens in (
        ("[[prefill]]", {}, 0),
        ("long", {"max_tokens": 5_000}, 3),
        ("four", {"max_tokens": 2_000, "n": 4}, 8),
    ):
        rid = await bench.accept(choices=sampling.get("n", 1))
        record = bench.record(rid, text, **sampling).model_copy(update={"leave_grace_ms": 0})
        await bench.dispatch(worker, record)
        await eventually(lambda r=rid: _attempts(bench, r, 1), "the attempt has started")
        await bench.tokens_out(rid, tokens)
        await _all_leave(bench, rid)
        outcome = (await bench.outcomes(rid))[rid]
        assert outcome.status is Status.CANCELLED
        reply = await bench.reply(rid)
        # What was produced until it took effect is what is booked, once (J11).
        assert outcome.usage.completion_tokens == reply.tokens_out < 4_000
        await eventually(lambda: _idle(bench, worker.worker_id), "the slots are free")


async def test_a_reply_that_somebody_reads_again_goes_on_D1(bench: WorkerBench) -> None:
    worker = await bench.start_worker()
    rid = await bench.accept()
    record = bench.record(rid, "again", max_tokens=600)
    presence = ReaderPresence(bench.client)
    await presence.vouch("one", [rid], [])
    await bench.dispatch(worker, record.model_copy(update={"leave_grace_ms": 2_000}))
    await bench.tokens_out(rid, 10)
    await presence.vouch("one", [], [rid])
    await bench.tokens_out(rid, 60)
    await presence.vouch("two", [rid], [])
    reply = await bench.sealed(rid)
    assert reply.terminal is not None
    assert reply.terminal.status is Status.COMPLETED
    assert reply.choices[0].text == expected_text(bench, "again", 600)


async def test_kill_9_mid_reply_is_continued_from_the_next_token_I1_E2(bench: WorkerBench) -> None:
    first, second = await bench.start_worker(), await bench.start_worker()
    rid = await bench.accept()
    await bench.dispatch(first, bench.record(rid, "take over", max_tokens=300))
    await bench.tokens_out(rid, 40)
    os.kill(first.process.pid, signal.SIGKILL)
    await eventually(lambda: _lease_gone(bench, rid), "the lease has run out")
    await bench.dispatch(second, bench.record(rid, "take over", attempt=2, max_tokens=300))
    reply = await bench.sealed(rid)
    assert reply.choices[0].text == expected_text(bench, "take over", 300)
    assert reply.attempts == 2
    assert reply.terminal is not None
    assert reply.terminal.finish_reasons == [FinishReason.LENGTH]
    assert reply.terminal.usage is not None
    assert reply.terminal.usage.completion_tokens == 300
    assert (await bench.outcomes(rid))[rid].attempts == 2


async def test_a_worker_lost_between_the_last_text_and_the_seal_leaves_only_the_seal_to_write_E2(
    bench: WorkerBench,
) -> None:
    worker = await bench.start_worker()
    pieces = [FIRST_PIECE + PIECES.index(p) for p in (b"He", b"llo <to", b"ol")]
    cases = [
        # All of the budget is out.
        ("full", {"max_tokens": 3}, Text("HeHeHe", (pieces[0],) * 3), "HeHeHe", FinishReason.LENGTH),
        # A stop string cut the last token: its other half must never come.
        ("[[tool]]", {"stop": ["to"]}, Text("Hello <", tuple(pieces[:2])), "Hello <", FinishReason.STOP),
    ]
    for text, sampling, out, whole, reason in cases:
        rid = await bench.accept()
        start = Started(worker_id="dead", model_revision="1")
        end = StreamId(1, len(out.token_ids))
        await bench.streams.append([(rid, StreamId(1, 0), start), (rid, end, out)])
        await bench.dispatch(worker, bench.record(rid, text, attempt=2, **sampling))
        reply = await bench.sealed(rid)
        assert reply.choices[0].text == whole
        assert reply.terminal is not None
        assert reply.terminal.finish_reasons == [reason]
        assert reply.terminal.usage is not None
        assert reply.terminal.usage.completion_tokens == len(out.token_ids)


async def test_two_choices_with_text_out_fail_clearly_when_their_worker_dies_I1(
    bench: WorkerBench,
) -> None:
    first, second = await bench.start_worker(), await bench.start_worker()
    rid = await bench.accept(choices=2)
    await bench.dispatch(first, bench.record(rid, "two", n=2, max_tokens=300))
    await bench.tokens_out(rid, 10)
    os.kill(first.process.pid, signal.SIGKILL)
    await eventually(lambda: _lease_gone(bench, rid), "the lease has run out")
    await bench.dispatch(second, bench.record(rid, "two", attempt=2, n=2, max_tokens=300))
    reply = await bench.sealed(rid)
    assert reply.terminal is not None
    assert reply.terminal.error is not None
    assert reply.terminal.error.code == ErrorCode.WORKER_LOST


async def test_a_frozen_worker_that_comes_back_is_fenced_I8(bench: WorkerBench) -> None:
    first, second = await bench.start_worker(), await bench.start_worker()
    rid = await bench.accept()
    await bench.dispatch(first, bench.record(rid, "freeze", max_tokens=400))
    await bench.tokens_out(rid, 20)
    os.kill(first.process.pid, signal.SIGSTOP)
    await eventually(lambda: _lease_gone(bench, rid), "the lease has run out")
    await bench.dispatch(second, bench.record(rid, "freeze", attempt=2, max_tokens=400))
    await eventually(lambda: _attempts(bench, rid, 2), "the second attempt has started")
    os.kill(first.process.pid, signal.SIGCONT)
    reply = await bench.sealed(rid)
    assert reply.choices[0].text == expected_text(bench, "freeze", 400)
    await eventually(lambda: _idle(bench, first.worker_id), "the old worker has let go")


async def test_a_hanging_reply_loses_its_lease_and_is_taken_over_I4(bench: WorkerBench) -> None:
    first, second = await bench.start_worker(), await bench.start_worker()
    rid = await bench.accept()
    await bench.dispatch(first, bench.record(rid, "[[hang]]", max_tokens=30))
    await bench.tokens_out(rid, 3)
    await eventually(lambda: _lease_gone(bench, rid), "the lease has run out")
    await bench.dispatch(second, bench.record(rid, "[[hang]]", attempt=2, max_tokens=30))
    assert (await bench.sealed(rid)).choices[0].text == expected_text(bench, "[[hang]]", 30)
    await eventually(lambda: _idle(bench, first.worker_id), "the hanging reply is aborted")


async def test_a_live_owner_is_not_disturbed_by_a_second_dispatch_G2(bench: WorkerBench) -> None:
    first, second = await bench.start_worker(), await bench.start_worker()
    rid = await bench.accept()
    await bench.dispatch(first, bench.record(rid, "mine", max_tokens=200))
    await bench.tokens_out(rid, 10)
    await bench.dispatch(second, bench.record(rid, "mine", attempt=2, max_tokens=200))
    await bench.dispatch(first, bench.record(rid, "mine", attempt=2, max_tokens=200))
    reply = await bench.sealed(rid)
    assert reply.attempts == 1
    assert reply.choices[0].text == expected_text(bench, "mine", 200)


async def test_a_dead_engine_ends_the_worker_and_seals_nothing_I7(bench: WorkerBench) -> None:
    first = await bench.start_worker()
    rid = await bench.accept()
    await bench.dispatch(first, bench.record(rid, "[[die]]", max_tokens=30))
    code = await asyncio.to_thread(first.process.wait, 20)
    assert code != 0
    last = [e for e in await bench.events() if e.worker_id == first.worker_id][-1]
    assert not last.accepting
    reply = await bench.reply(rid)
    assert reply.terminal is None
    assert reply.tokens_out == 3
    await eventually(lambda: _lease_gone(bench, rid), "the lease has run out")
    second = await bench.start_worker()
    await bench.dispatch(second, bench.record(rid, "[[die]]", attempt=2, max_tokens=30))
    assert (await bench.sealed(rid)).choices[0].text == expected_text(bench, "[[die]]", 30)


async def test_records_that_cannot_be_read_are_dead_lettered_and_the_next_one_served_G5_G16(
    bench: WorkerBench,
) -> None:
    worker = await bench.start_worker()
    rid = await bench.accept()
    newer = json.loads(bench.record(rid, "x").encode()) | {"schema_version": 2}
    raws = [b"not json", b"{", b"\xff", b"[]", b"null", b'"str"', b"[" * 900, json.dumps(newer).encode()]
    for raw in raws:
        await bench.raw(worker, raw)
    assert (await bench.generate(worker, "after")).terminal is not None
    letters = await bench.dead_letters(len(raws))
    assert {letter["reason"] for letter in letters} == {"malformed", "newer_schema"}
    assert sorted(letter["offset"] for letter in letters) == list(range(len(raws)))
    ended = await bench.sealed(rid)
    assert ended.terminal is not None
    assert ended.terminal.error is not None
    assert ended.terminal.error.code == ErrorCode.BAD_RECORD


async def test_a_request_past_its_deadline_never_reaches_the_engine_D5(bench: WorkerBench) -> None:
    worker = await bench.start_worker()
    rid = await bench.accept()
    late = bench.record(rid, "late").model_copy(update={"deadline_ms": 1})
    await bench.dispatch(worker, late)
    reply = await bench.sealed(rid)
    assert reply.terminal is not None
    assert reply.terminal.status is Status.EXPIRED
    assert reply.attempts == 0
    assert (await bench.outcomes(rid))[rid].status is Status.EXPIRED


async def test_a_request_without_a_stream_ends_with_an_outcome_that_says_so(bench: WorkerBench) -> None:
    worker = await bench.start_worker()
    rid = await bench.accept()
    await bench.client.delete(f"hr:{{{rid}}}:s")
    await bench.dispatch(worker, bench.record(rid, "lost"))
    outcome = (await bench.outcomes(rid))[rid]
    assert outcome.error is not None
    assert outcome.error.code == ErrorCode.STREAM_LOST


async def test_sigterm_lets_replies_finish_and_takes_nothing_new_Q4(bench: WorkerBench) -> None:
    worker = await bench.start_worker()
    rid = await bench.accept()
    await bench.dispatch(worker, bench.record(rid, "drain", max_tokens=200))
    await bench.tokens_out(rid, 5)
    worker.process.terminate()
    reply = await bench.sealed(rid)
    assert reply.choices[0].text == expected_text(bench, "drain", 200)
    assert await asyncio.to_thread(worker.process.wait, 15) == 0
    assert not [e for e in await bench.events() if e.worker_id == worker.worker_id][-1].accepting
    # Its position is committed: the next worker of the slot repeats nothing.
    again = await bench.start_worker()
    assert again.slot == worker.slot
    await bench.generate(again, "next")
    outcomes = await bench.outcomes(rid)
    assert outcomes[rid].status is Status.COMPLETED


async def test_a_finished_request_is_reported_to_the_schedulers_at_once(bench: WorkerBench) -> None:
    worker = await bench.start_worker()
    rid = await bench.accept()
    await bench.dispatch(worker, bench.record(rid, "report"))
    await bench.sealed(rid)

    async def reported() -> bool:
        return any(rid in event.finished for event in await bench.events())

    await eventually(reported, "the finish is in the feed")


async def _attempts(bench: WorkerBench, rid: str, count: int) -> bool:
    return (await bench.reply(rid)).attempts >= count


async def _lease_gone(bench: WorkerBench, rid: str) -> bool:
    return (await bench.streams.lease_holders([rid])) == [None]


async def _idle(bench: WorkerBench, worker_id: str) -> bool:
    mine = [event for event in await bench.events() if event.worker_id == worker_id]
    return mine[-1].running == 0
