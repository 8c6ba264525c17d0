"""C8 and N1: what fits into the context, what is queued, what is checked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import ApiError, ErrorCode
from contracts.records import Message, QueuedRecord, RequestRecord, Sampling, decode
from contracts.tiers import QueueClass, Status
from infra.settings import ModelSettings
from stages.moderation import queued_record, resolve_max_tokens, status_of, texts_to_check

LIMIT = 100
MODEL = ModelSettings(path="builtin:sim", context_length=LIMIT, default_max_tokens=40)


def refusal(prompt_tokens: int, sampling: Sampling) -> ApiError:
    with pytest.raises(ApiError) as caught:
        resolve_max_tokens(sampling, prompt_tokens, MODEL)
    assert caught.value.status == 400
    assert caught.value.body.code == "context_length_exceeded"
    assert caught.value.body.param == "messages"
    return caught.value


@pytest.mark.parametrize("prompt_tokens", [LIMIT, LIMIT + 1, 10 * LIMIT])
@pytest.mark.parametrize("max_tokens", [None, 1, 10**12])
def test_c8_a_prompt_that_leaves_no_room_is_refused_with_true_numbers(
    prompt_tokens: int, max_tokens: int | None
) -> None:
    message = refusal(prompt_tokens, Sampling(max_tokens=max_tokens)).body.message
    assert f"maximum context length is {LIMIT} tokens" in message
    assert f"resulted in {prompt_tokens} tokens" in message


def test_c8_prompt_and_completion_over_the_limit_are_refused_with_true_numbers() -> None:
    message = refusal(LIMIT - 1, Sampling(max_tokens=2)).body.message
    assert f"maximum context length is {LIMIT} tokens" in message
    assert "requested 101 tokens (99 in the messages, 2 in the completion)" in message


def test_c8_exactly_the_limit_fits() -> None:
    assert resolve_max_tokens(Sampling(max_tokens=1), LIMIT - 1, MODEL) == 1
    assert resolve_max_tokens(Sampling(max_tokens=90), 10, MODEL) == 90


def test_without_a_wish_the_reply_gets_the_default_or_what_is_left() -> None:
    assert resolve_max_tokens(Sampling(), 10, MODEL) == 40
    assert resolve_max_tokens(Sampling(), 80, MODEL) == 20


def test_min_tokens_raises_the_default_and_must_fit() -> None:
    assert resolve_max_tokens(Sampling(min_tokens=60), 10, MODEL) == 60
    assert (
        "(50 in the messages, 60 in the completion)" in refusal(50, Sampling(min_tokens=60)).body.message
    )


@given(st.integers(0, 3 * LIMIT), st.none() | st.integers(1, 3 * LIMIT), st.integers(0, 2 * LIMIT))
def test_what_is_let_through_always_fits(prompt: int, max_tokens: int | None, min_tokens: int) -> None:
    sampling = Sampling(max_tokens=max_tokens, min_tokens=min_tokens if max_tokens is None else 0)
    try:
        resolved = resolve_max_tokens(sampling, prompt, MODEL)
    except ApiError:
        return
    assert 1 <= resolved <= LIMIT - prompt
    assert resolved >= sampling.min_tokens


def request(tenant: str = "t1") -> RequestRecord:
    return RequestRecord(
        request_id="chatcmpl-" + "0" * 32,
        tenant=tenant,
        key_id="k",
        tier="paid",
        queue_class=QueueClass.INTERACTIVE,
        model="m",
        pool="default",
        created_ms=1,
        deadline_ms=2,
        conversation_id="c",
        turn=[Message(role="user", content="hi")],
        sampling=Sampling(stop=["x"], logit_bias={5: 1.0}),
        messages=[Message(role="user", content="hi")],
    )


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        (Sampling(), 30),
        (Sampling(max_tokens=90), 30),
        (Sampling(max_tokens=7), 7),
        (Sampling(min_tokens=35), 35),
    ],
)
def test_a_reply_made_shorter_by_overload_fits_whatever_it_asked_for(
    sampling: Sampling, tokens: int
) -> None:
    capped = request().model_copy(update={"sampling": sampling, "max_tokens_cap": 30})
    assert queued_record(capped, [1] * 10, MODEL, 3).sampling.max_tokens == tokens


def test_a_cap_never_makes_a_prompt_fit_that_would_not() -> None:
    capped = request().model_copy(update={"sampling": Sampling(max_tokens=90), "max_tokens_cap": 1})
    with pytest.raises(ApiError):
        queued_record(capped, [1] * 11, MODEL, 3)


def test_the_queued_record_carries_everything_but_the_messages_and_reads_back() -> None:
    queued = queued_record(request(), list(range(60)), MODEL, 3)
    assert decode(QueuedRecord, queued.encode()) == queued
    carried = request().model_dump(exclude={"messages", "sampling", "max_tokens_cap"})
    assert {k: v for k, v in queued.model_dump().items() if k in carried} == carried
    assert queued.sampling == Sampling(stop=["x"], logit_bias={5: 1.0}, max_tokens=40)
    assert queued.prompt_token_ids == list(range(60))
    assert queued.moderated_ms == 3
    assert "messages" not in queued.model_dump()


def test_n1_prefix_hashes_are_salted_by_the_tenant() -> None:
    model = ModelSettings(path="builtin:sim", context_length=4096)
    ids = list(range(600))
    one, same, other = (queued_record(request(t), ids, model, 3).prefix_hashes for t in ("a", "a", "b"))
    assert len(one) == 2
    assert one == same
    assert not set(one) & set(other)


def test_what_people_wrote_is_checked_and_the_models_own_words_are_not() -> None:
    roles = ("system", "developer", "user", "assistant")
    messages = [Message(role=role, content=role) for role in roles]
    assert texts_to_check(messages) == ["system", "developer", "user"]


def test_refusals_are_refused_and_our_own_faults_are_failures() -> None:
    assert status_of(ApiError(ErrorCode.CONTENT_FILTER, "")) is Status.REFUSED
    assert status_of(ApiError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "")) is Status.REFUSED
    assert status_of(ApiError(ErrorCode.MODERATION_UNAVAILABLE, "")) is Status.FAILED
