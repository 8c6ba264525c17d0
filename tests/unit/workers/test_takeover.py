"""What a worker does with a request, by the state of its token stream."""

from __future__ import annotations

from typing import Any

from contracts.entries import (
    Accepted,
    Dispatched,
    Entry,
    Moderated,
    Started,
    StreamEntry,
    Terminal,
    Text,
)
from contracts.records import DispatchRecord, Sampling
from contracts.reply import Reply
from contracts.stream_ids import SEAL, StreamId
from contracts.tiers import FinishReason, QueueClass, Status
from workers.takeover import Expired, Finished, Foreign, Generate, Lost, NotContinuable, decide, ended_as

ME, OTHER = "w-1", "w-2"
RID = "chatcmpl-" + "0" * 32


def record(attempt: int = 1, **sampling: Any) -> DispatchRecord:
    return DispatchRecord(
        request_id=RID,
        tenant="t",
        key_id="k",
        tier="paid",
        queue_class=QueueClass.INTERACTIVE,
        model="m",
        pool="default",
        created_ms=0,
        deadline_ms=1_000,
        sampling=Sampling(max_tokens=10, **sampling),
        prompt_token_ids=[1, 2, 3],
        moderated_ms=0,
        attempt=attempt,
        worker_id=ME,
        dispatched_ms=0,
    )


def stream(*entries: tuple[tuple[int, int], Entry]) -> Reply:
    accepted = Accepted(tenant="t", tier="paid", model="m", created_ms=0)
    items = [
        ((0, 1), accepted),
        ((0, 2), Moderated(prompt_tokens=3)),
        ((0, 3), Dispatched(worker_id=ME)),
    ]
    return Reply().extend(StreamEntry(StreamId(*i), e) for i, e in [*items, *entries])


def started(attempt: int) -> tuple[tuple[int, int], Entry]:
    return (attempt, 0), Started(worker_id=OTHER, model_revision="1")


def decided(
    reply: Reply,
    *,
    holder: str | None = None,
    now_ms: int = 0,
    continues: bool = True,
    **options: Any,
) -> Any:
    return decide(
        record(**options),
        reply,
        lease_holder=holder,
        worker_id=ME,
        continues=continues,
        now_ms=now_ms,
    )


def test_a_request_nobody_started_is_generated_from_the_start() -> None:
    assert decided(stream()) == Generate(1)
    assert decided(stream(), attempt=3) == Generate(3)


def test_a_request_past_its_deadline_is_not_started_D5() -> None:
    assert decided(stream(), now_ms=1_001) == Expired()
    assert decided(stream(started(1)), now_ms=1_001) == Generate(2)


def test_a_live_owner_is_left_alone_whatever_the_attempt_says() -> None:
    assert decided(stream(started(1)), holder=OTHER, attempt=2) == Foreign()
    assert decided(stream(started(1)), holder=ME) == Generate(2)


def test_a_dead_owner_is_continued_after_the_tokens_that_are_out_I1() -> None:
    reply = stream(started(1), ((1, 2), Text("ab", (7, 8))), ((1, 3), Text("c", (9,))))
    assert decided(reply, attempt=2) == Generate(2, (7, 8, 9))
    assert decided(reply) == Generate(2, (7, 8, 9))


def test_tokens_of_all_attempts_are_carried_over() -> None:
    reply = stream(started(1), ((1, 1), Text("a", (7,))), started(2), ((2, 2), Text("b", (8,))))
    assert decided(reply, attempt=2) == Generate(3, (7, 8))


def test_several_choices_with_text_out_fail_and_without_start_anew_I1() -> None:
    assert decided(stream(started(1), ((1, 1), Text("a", (7,)))), n=2) == NotContinuable()
    assert decided(stream(started(1)), n=2) == Generate(2)


def test_what_the_engine_cannot_continue_fails_once_text_is_out_and_starts_anew_before_I1() -> None:
    out = stream(started(1), ((1, 1), Text("a", (7,))))
    assert decided(out, continues=False) == NotContinuable()
    assert decided(stream(started(1)), continues=False) == Generate(2)


def test_logprobs_are_continued_each_token_carries_its_own_I1() -> None:
    out = stream(started(1), ((1, 1), Text("a", (7,), logprobs=({"token": "a"},))))
    assert decided(out, top_logprobs=2) == Generate(2, (7,))


def test_a_sealed_request_only_needs_its_outcome_I5() -> None:
    sealed = ((SEAL.attempt, SEAL.token), Terminal(status=Status.CANCELLED))
    assert decided(stream(started(1), sealed), holder=OTHER) == Finished()


def test_a_request_without_a_stream_is_lost() -> None:
    assert decided(Reply()) == Lost()


def test_a_choice_whose_last_token_was_cut_by_a_stop_string_has_ended_E2() -> None:
    assert ended_as(2, "a <en", "a ", budget=9) is FinishReason.STOP
    assert ended_as(2, "a <en", "a ", budget=2) is FinishReason.STOP


def test_a_choice_with_its_budget_out_has_ended_E2() -> None:
    assert ended_as(2, "a b", "a b", budget=2) is FinishReason.LENGTH
    assert ended_as(2, "ok", "ok!", budget=2) is FinishReason.LENGTH
    assert ended_as(2, "a b", "a b", budget=3) is None
    assert ended_as(2, "a b", "a b", budget=None) is None


def test_a_choice_that_ended_inside_a_character_has_ended_E2() -> None:
    assert ended_as(2, "ok", "ok!", budget=9) is FinishReason.STOP
