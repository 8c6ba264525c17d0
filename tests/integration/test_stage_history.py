"""The history stage on a real broker and Redis."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from contracts.errors import ErrorCode, error_body
from contracts.identity import make_request_id
from contracts.keep import Keep
from contracts.records import DeadLetterRecord, Message, OutcomeChoice, OutcomeRecord, Usage
from contracts.stored_reply import ended_reply
from contracts.tiers import Status
from infra.conversations_redis import Conversations
from infra.stored_replies_redis import StoredReplies
from stages.errors import RoleStuck
from stages.history_faust import EPOCH_KEY, HistoryRole, Rebuild
from tests.outcome_log import lose_the_tail

from .stage_bench import Bench, now_ms, running, stage_settings, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_TURNS = 5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(kafka: str, redis_server: str) -> AsyncIterator[Bench]:
    settings = stage_settings(kafka, redis_server, 904, history={"max_turns": MAX_TURNS})
    async with Bench(settings) as made, running(HistoryRole(settings)):
        yield made


def conversations(bench: Bench) -> Conversations:
    return Conversations(bench.redis, bench.settings.history)


def outcome(number: int, conversation: str | None, **fields: Any) -> OutcomeRecord:
    base: dict[str, Any] = {
        "request_id": make_request_id(1_000_000 + number, os.urandom(10)),
        "tenant": "t1",
        "key_id": "k",
        "tier": "paid",
        "model": "m",
        "conversation_id": conversation,
        "created_ms": 1_000_000 + number,
        "finished_ms": now_ms(),
        "turn": [Message(role="user", content=f"question {number}")],
        "status": Status.COMPLETED,
        "choices": [OutcomeChoice(index=0, text=f"answer {number}")],
        "usage": Usage(prompt_tokens=3, completion_tokens=2),
    }
    return OutcomeRecord.model_validate(base | fields)


async def publish(bench: Bench, record: OutcomeRecord) -> None:
    await bench.publisher.send(bench.topics.outcomes, record.encode(), key=record.request_id)


async def replies(bench: Bench, conversation: str, tenant: str = "t1") -> list[str]:
    turns, _ = await conversations(bench).load(tenant, conversation)
    return [t.reply for t in turns]


async def has(bench: Bench, conversation: str, expected: list[str]) -> None:
    async def stored() -> bool:
        return await replies(bench, conversation) == expected

    await until(stored, f"{conversation} holds {expected}")


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_outcomes_become_turns_in_order_of_acceptance_whatever_the_order_of_arrival(
    bench: Bench,
) -> None:
    for number in (3, 1, 2):
        await publish(bench, outcome(number, "ordered"))
    await has(bench, "ordered", ["answer 1", "answer 2", "answer 3"])


async def test_a_repeated_outcome_is_stored_and_counted_once(bench: Bench) -> None:
    record = outcome(1, "repeated")
    before = counted("headrace_requests_total", tier="paid", status="completed")
    tokens = counted("headrace_tokens_total", tier="paid", kind="completion")
    for _ in range(3):
        await publish(bench, record)
    last = outcome(2, "repeated", tier="free")
    await publish(bench, last)
    await until(lambda: _turns(bench, "repeated", 2), "both turns")
    assert counted("headrace_requests_total", tier="paid", status="completed") == before + 1
    assert counted("headrace_tokens_total", tier="paid", kind="completion") == tokens + 2


async def _turns(bench: Bench, conversation: str, count: int) -> bool:
    return len(await replies(bench, conversation)) == count


async def test_b8_failed_turns_are_not_stored_and_leave_no_pending_note(bench: Bench) -> None:
    failed = outcome(
        1,
        "failing",
        status=Status.FAILED,
        error=error_body(ErrorCode.ENGINE_ERROR, "the engine failed"),
    )
    await conversations(bench).add_pending("t1", "failing", failed.request_id, failed.turn)
    turns, pending = await conversations(bench).load("t1", "failing")
    assert (turns, list(pending)) == ([], [failed.request_id])
    await publish(bench, failed)
    await publish(bench, outcome(2, "failing", status=Status.CANCELLED))
    await has(bench, "failing", ["answer 2"])

    async def settled() -> bool:
        return (await conversations(bench).load("t1", "failing"))[1] == {}

    await until(settled, "no pending note")


async def test_only_the_latest_turns_are_kept(bench: Bench) -> None:
    for number in range(MAX_TURNS + 4):
        await publish(bench, outcome(number, "long"))
    await has(bench, "long", [f"answer {n}" for n in range(4, MAX_TURNS + 4)])


async def test_n4_tenants_and_conversations_do_not_mix(bench: Bench) -> None:
    await publish(bench, outcome(1, "c", tenant="a:b"))
    await publish(bench, outcome(2, "b:c", tenant="a"))
    await until(lambda: _is(bench, "c", "a:b", ["answer 1"]), "first")
    await until(lambda: _is(bench, "b:c", "a", ["answer 2"]), "second")
    assert await replies(bench, "c", "other") == []


async def _is(bench: Bench, conversation: str, tenant: str, expected: list[str]) -> bool:
    return await replies(bench, conversation, tenant) == expected


async def test_p1_unknown_tiers_share_one_label(bench: Bench) -> None:
    before = counted("headrace_requests_total", tier="other", status="completed")
    for number in range(3):
        await publish(bench, outcome(number, f"tier{number}", tier=f"invented-{number}"))
        await has(bench, f"tier{number}", [f"answer {number}"])
    await until(
        lambda: counted("headrace_requests_total", tier="other", status="completed") == before + 3,
        "counted",
    )


@pytest.mark.parametrize("value", [b"not json", b"\xff", b"null", b"[" * 900 + b"]" * 900, b"{}"])
async def test_g5_a_poison_outcome_is_dead_lettered_and_the_next_one_stored(
    bench: Bench, value: bytes
) -> None:
    before = len(bench.deadletter.records)
    for partition in range(2):
        await bench.publisher.send(bench.topics.outcomes, value, partition=partition)
    await until(lambda: len(bench.deadletter.records) == before + 2, "dead letters")
    letter = DeadLetterRecord.model_validate_json(bench.deadletter.records[-1].value)
    assert (letter.stage, letter.topic) == ("history", bench.topics.outcomes)
    name = f"after-{before}"
    for number in range(6):
        await publish(bench, outcome(number, name))
    await until(lambda: _turns(bench, name, MAX_TURNS), "served on")


async def test_a_bug_in_handling_sets_the_outcome_aside_and_the_stage_lives_G7(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Conversations.store

    async def broken(self: Conversations, made: OutcomeRecord) -> None:
        if made.conversation_id == "bug":
            raise TypeError("a bug")
        await store(self, made)

    monkeypatch.setattr(Conversations, "store", broken)
    before = len(bench.deadletter.records)
    await publish(bench, outcome(0, "bug"))
    await until(lambda: len(bench.deadletter.records) == before + 1, "the dead letter")
    letter = DeadLetterRecord.model_validate_json(bench.deadletter.records[-1].value)
    assert (letter.stage, letter.reason) == ("history", "handler_error")
    await publish(bench, outcome(1, "after-bug"))
    await has(bench, "after-bug", ["answer 1"])


async def test_conversations_and_kept_replies_lost_with_their_redis_are_rebuilt_from_the_outcomes(
    kafka: str, redis_server: str
) -> None:
    settings = stage_settings(kafka, redis_server, 905, history={"max_turns": MAX_TURNS})
    kept = outcome(9, None, keep=Keep(kind="chat.completion", metadata={"a": "b"}))

    async def stored() -> bool:
        return await StoredReplies(bench.redis, settings.stored).get(
            "t1", kept.request_id
        ) == ended_reply(kept)

    async with Bench(settings) as bench:
        async with running(HistoryRole(settings)) as work:
            for number in range(8):
                await publish(bench, outcome(number, f"kept{number % 2}"))
            await publish(bench, kept)
            await bench.publisher.send(bench.topics.outcomes, b"poison", partition=0)
            await until(stored, "the kept reply")
            await has(bench, "kept0", ["answer 0", "answer 2", "answer 4", "answer 6"])
            await has(bench, "kept1", ["answer 1", "answer 3", "answer 5", "answer 7"])
            assert await bench.redis.exists(EPOCH_KEY)
            assert not work.done()
        await bench.redis.flushdb()
        async with running(HistoryRole(settings)):
            await until(stored, "the kept reply again")
            await has(bench, "kept0", ["answer 0", "answer 2", "answer 4", "answer 6"])
            await has(bench, "kept1", ["answer 1", "answer 3", "answer 5", "answer 7"])
            assert not await Rebuild(settings, bench.redis).lost()


async def test_a_rebuild_from_a_broker_that_gives_no_more_starts_over(
    kafka: str, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.history_faust.REBUILD_SILENCE_SECONDS", 0.5)
    settings = stage_settings(kafka, redis_server, 907)
    async with Bench(settings) as bench:
        await publish(bench, outcome(1, "kept", created_ms=now_ms()))
        lose_the_tail(monkeypatch, 1)
        with pytest.raises(RoleStuck, match="no outcomes"):
            await Rebuild(settings, bench.redis).run()
        assert await Rebuild(settings, bench.redis).lost(), "it is not taken for done"
        turns, _ = await Conversations(bench.redis, settings.history).load("t1", "kept")
        assert [turn.reply for turn in turns] == ["answer 1"], "what was given is there"


async def test_a_redis_that_loses_its_data_under_a_running_stage_makes_it_start_again(
    kafka: str, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.history_faust.EPOCH_CHECK_SECONDS", 0.05)
    settings = stage_settings(kafka, redis_server, 906)
    async with Bench(settings) as bench, running(HistoryRole(settings)) as work:
        await bench.redis.flushdb()
        with pytest.raises(RoleStuck, match="lost the conversations"):
            await work
