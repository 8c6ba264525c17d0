"""What a request gets at each step of the overload ladder."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.degraded import OverloadLevel, OverloadStep
from contracts.identity import Principal
from contracts.sim_tokens import sim_token_ids
from infra.settings import Settings, development, parse
from producers.chat_request import ChatRequest, parse_chat_request
from producers.degradation import Refused, Terms, most_tokens, terms_of

STEPS = list(OverloadStep)
FREE, PAID, BATCH = (Principal(f"k-{t}", f"t-{t}", t) for t in ("free", "paid", "batch"))


def settings(**small: Any) -> Settings:
    raw = development("sim").model_dump(mode="json")
    raw["tiers"]["free"]["max_wait_seconds"] = 100
    raw["overload"] |= {
        "wait_factor": 3,
        "shrink_factor": 0.5,
        "shrink_floor": 100,
        "retry_after_seconds": 9,
    }
    raw["models"] = {
        "large": {
            "path": "builtin:sim",
            "pool": "large",
            "fallback": "small",
            "default_max_tokens": 600,
            "context_length": 8_192,
        },
        "small": {"path": "builtin:sim", "pool": "small", "context_length": 1_024, **small},
        "tiny": {"path": "builtin:sim", "pool": "tiny", "context_length": 512},
    }
    return parse(raw)


def ask(made: Settings, who: Principal, text: str = "hello", **fields: Any) -> ChatRequest:
    body = {"model": "large", "messages": [{"role": "user", "content": text}], **fields}
    return parse_chat_request(body, made, who)


def terms(
    step: OverloadStep,
    who: Principal = FREE,
    *,
    made: Settings | None = None,
    others: dict[str, OverloadStep] | None = None,
    **body: Any,
) -> Terms:
    made = made or settings()
    request = ask(made, who, **body)
    steps = {"large": step, **(others or {})}
    levels = {pool: OverloadLevel(at, f"{pool} is slow") for pool, at in steps.items()}
    return terms_of(who, request, request.messages, made, levels)


def step_of(found: Terms) -> str | None:
    return found.degraded.step if found.degraded is not None else None


@pytest.mark.parametrize("step", STEPS)
def test_paid_requests_get_everything_until_the_last_step(step: OverloadStep) -> None:
    if step is OverloadStep.INTERACTIVE_REFUSED:
        with pytest.raises(Refused) as refused:
            terms(step, PAID)
        assert (refused.value.status, refused.value.retry_after_seconds) == (429, 9)
        assert refused.value.code.value == "overloaded"
        return
    assert terms(step, PAID) == Terms("large", "large", 60.0)


@pytest.mark.parametrize("step", STEPS)
def test_batch_requests_are_taken_at_every_step_and_told_that_they_wait(step: OverloadStep) -> None:
    found = terms(step, BATCH)
    assert (found.model, found.max_tokens_cap) == ("large", None)
    assert step_of(found) == (None if step is OverloadStep.NORMAL else "batch_paused")


def test_free_requests_wait_longer_from_the_second_step_on() -> None:
    assert terms(OverloadStep.BATCH_PAUSED) == Terms("large", "large", 100.0)
    found = terms(OverloadStep.STANDARD_WAITS)
    assert (found.model, found.max_wait_seconds, step_of(found)) == ("large", 300.0, "standard_waits")
    assert found.degraded is not None
    assert found.degraded.reason == "large is slow"


def test_free_requests_get_the_fallback_model_instead_of_everything_that_comes_after() -> None:
    for step in STEPS[3:]:
        found = terms(step)
        assert (found.model, found.pool, found.max_tokens_cap) == ("small", "small", None)
        assert step_of(found) == "standard_smaller_model"


def test_a_fallback_that_is_overloaded_itself_is_passed_over_for_its_own() -> None:
    made = settings(fallback="tiny")
    crowded = {"small": OverloadStep.STANDARD_SMALLER_MODEL}
    assert terms(OverloadStep.STANDARD_SHORTER, made=made, others=crowded).model == "tiny"
    crowded["tiny"] = OverloadStep.INTERACTIVE_REFUSED
    assert terms(OverloadStep.STANDARD_SHORTER, made=made, others=crowded).model == "large"
    with pytest.raises(Refused):
        terms(OverloadStep.STANDARD_REFUSED, made=made, others=crowded)


@pytest.mark.parametrize(
    "body",
    [
        {"text": "x" * 1_000},
        {"max_tokens": 1_000},
        {"min_tokens": 1_000},
        {"logit_bias": {"7": 1.0}},
    ],
)
def test_what_a_fallback_could_not_take_stays_with_its_model(body: dict[str, Any]) -> None:
    found = terms(OverloadStep.STANDARD_SMALLER_MODEL, **body)
    assert (found.model, step_of(found)) == ("large", "standard_waits")


@pytest.mark.parametrize(
    ("body", "cap"),
    [({}, 300), ({"max_tokens": 5_000}, 2_500), ({"max_tokens": 150}, 100), ({"max_tokens": 100}, None)],
)
def test_without_a_fallback_replies_become_shorter_but_short_ones_are_left_alone(
    body: dict[str, Any], cap: int | None
) -> None:
    crowded = {"small": OverloadStep.STANDARD_SHORTER}
    found = terms(OverloadStep.STANDARD_SHORTER, others=crowded, **body)
    assert found.max_tokens_cap == cap
    assert step_of(found) == ("standard_waits" if cap is None else "standard_shorter")


def test_refused_free_requests_are_told_when_to_come_again() -> None:
    with pytest.raises(Refused) as refused:
        terms(OverloadStep.STANDARD_REFUSED, others={"small": OverloadStep.STANDARD_REFUSED})
    assert (refused.value.status, refused.value.retry_after_seconds) == (429, 9)
    assert refused.value.step is OverloadStep.STANDARD_REFUSED


def test_the_level_of_another_pool_says_nothing() -> None:
    assert (
        terms(OverloadStep.NORMAL, others={"small": OverloadStep.INTERACTIVE_REFUSED}).degraded is None
    )


@given(st.lists(st.text(max_size=200), min_size=1, max_size=5), st.integers(1, 50))
def test_the_bound_of_the_tokens_is_never_below_what_they_are(texts: list[str], asked: int) -> None:
    made = settings()
    texts = [t for t in texts if t.encode(errors="ignore").decode() == t] or ["x"]
    body = {"model": "large", "messages": [{"role": "user", "content": t or "x"} for t in texts]}
    request = parse_chat_request({**body, "max_tokens": asked}, made, FREE)
    prompt = "\n".join([*(f"{m.role}: {m.content}" for m in request.messages), "assistant:"])
    assert most_tokens(request.sampling, request.messages) >= len(sim_token_ids(prompt)) + asked
