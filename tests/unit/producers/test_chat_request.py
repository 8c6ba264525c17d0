"""What a chat completion body may hold: areas B10, C, A11, N7 and N10 of the field cases."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import ApiError, ErrorCode
from contracts.identity import Principal
from infra.settings import Settings, development
from producers.chat_messages import MAX_MESSAGES
from producers.chat_options import MAX_BIASED_TOKENS, MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH
from producers.chat_request import ChatRequest, counted_as, parse_chat_request

PAID = Principal(key_id="dev", tenant="dev", tier="paid")
USER = [{"role": "user", "content": "hello"}]


def settings_with(**model: Any) -> Settings:
    raw = development("sim").model_dump(mode="json")
    raw["models"]["big"] = {"path": "builtin:sim", **model}
    return Settings.model_validate(raw)


SETTINGS = settings_with(tiers=["free"])


def parsed(**fields: Any) -> ChatRequest:
    return parse_chat_request({"model": "default", "messages": USER, **fields}, SETTINGS, PAID)


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parsed(**fields)
    json.dumps(raised.value.body.model_dump()).encode()
    return raised.value


def test_a_plain_body_is_accepted_with_neutral_sampling() -> None:
    request = parsed()
    assert request.model == "headrace-sim"
    assert [m.model_dump(exclude_none=True) for m in request.messages] == USER
    assert request.sampling.temperature == 1.0
    assert request.sampling.max_tokens is None
    assert not request.stream
    assert not request.include_usage


@pytest.mark.parametrize("stream", [None, False, True])
def test_b10_null_is_absent_everywhere(stream: bool | None) -> None:
    names = [
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "tools",
        "tool_choice",
        "functions",
        "user",
        "max_tokens",
        "min_tokens",
        "seed",
        "max_completion_tokens",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "ignore_eos",
        "response_format",
        "stream_options",
        "conversation_id",
        "metadata",
        "audio",
        "modalities",
        "prediction",
        "web_search_options",
        "function_call",
    ]
    request = parsed(stream=stream, **dict.fromkeys(names))
    assert request.sampling == parsed().sampling
    assert request.conversation_id is None


@pytest.mark.parametrize("service_tier", [None, "auto", "default"])
def test_a_request_counts_for_its_caller(service_tier: str | None) -> None:
    assert counted_as(SETTINGS, PAID, parsed(service_tier=service_tier)) == PAID


def test_a_flex_request_counts_as_a_line_of_a_batch_and_may_use_what_its_caller_may() -> None:
    batch = Principal(key_id="dev", tenant="dev", tier="batch")
    assert counted_as(SETTINGS, PAID, parsed(service_tier="flex")) == batch
    assert counted_as(SETTINGS, batch, parsed(service_tier="flex")) == batch
    assert refused(service_tier="flex", model="big").code is ErrorCode.MODEL_NOT_ALLOWED


@pytest.mark.parametrize("service_tier", ["priority", "scale", "batch", "", 1])
def test_other_service_tiers_are_refused_by_name(service_tier: object) -> None:
    error = refused(service_tier=service_tier)
    assert error.body.param == "service_tier"
    assert "'auto', 'default' or 'flex'" in error.body.message


def test_flex_without_a_tier_for_batches_is_refused() -> None:
    tiers = {name: tier for name, tier in SETTINGS.tiers.items() if name != "batch"}
    settings = SETTINGS.model_copy(update={"tiers": tiers})
    body = {"model": "default", "messages": USER, "service_tier": "flex"}
    with pytest.raises(ApiError) as raised:
        parse_chat_request(body, settings, PAID)
    assert raised.value.body.param == "service_tier"
    assert "not offered" in raised.value.body.message


def test_c1_empty_assistant_text_is_a_turn() -> None:
    messages = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "B"},
    ]
    assert [m.content for m in parsed(messages=messages).messages] == ["A", "", "B"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        ([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1), "messages"),
        ([1], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([USER[0], {"role": "assistant", "content": None}], "messages[1].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "name": ""}], "messages[0].name"),
    ],
)
def test_c1_c10_a_bad_message_is_named(messages: Any, param: str) -> None:
    error = refused(messages=messages)
    assert (error.status, error.body.param) == (400, param)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].role"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": "", "function_call": {}}, "messages[0].function_call"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]},
            "messages[0].content[1]",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "file"}]}, "messages[0].content[0]"),
    ],
)
def test_c7_what_is_not_supported_is_refused_by_name(message: Any, param: str) -> None:
    error = refused(messages=[message])
    assert error.code is ErrorCode.UNSUPPORTED
    assert (error.status, error.body.param) == (400, param)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("functions", [{}]),
        ("function_call", "auto"),
        ("audio", {}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content"}),
        ("web_search_options", {}),
    ],
)
def test_unsupported_parameters_are_refused_by_name(field: str, value: Any) -> None:
    error = refused(**{field: value})
    assert (error.code, error.status, error.body.param) == (ErrorCode.UNSUPPORTED, 400, field)


@pytest.mark.parametrize(
    ("field", "value"), [("tools", []), ("tool_choice", "none"), ("modalities", ["text"])]
)
def test_unsupported_parameters_may_ask_for_nothing(field: str, value: Any) -> None:
    parsed(**{field: value})


def test_system_messages_alone_and_text_parts_are_accepted() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parsed(messages=[{"role": "system", "content": parts}])
    assert request.messages[0].content == "a\nb"


@pytest.mark.parametrize("model", [None, "", 123, ["default"], {}])
def test_c2_a_body_without_a_usable_model_is_refused(model: Any) -> None:
    error = refused(model=model)
    assert (error.status, error.body.param) == (400, "model")


@pytest.mark.parametrize(
    "model", ["DEFAULT", " default ", "nope", "headrace", "x" * 2048 + "\n", "a\nb"]
)
def test_n7_n10_unknown_models_are_404_and_named_only_when_short_and_plain(model: str) -> None:
    error = refused(model=model, messages=[])
    assert (error.status, error.code) == (404, ErrorCode.MODEL_NOT_FOUND)
    assert len(error.body.message) < 200
    assert error.body.message.isprintable()


def test_n7_a_model_of_another_tier_is_403() -> None:
    error = refused(model="big")
    assert (error.status, error.code) == (403, ErrorCode.MODEL_NOT_ALLOWED)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, "5", 1e12, 5.0, 10**12, True, [], 2**70])
def test_c4_a_bad_token_limit_never_gets_through(field: str, value: Any) -> None:
    error = refused(**{field: value})
    assert (error.status, error.body.param) == (400, field)


def test_token_limits_must_agree() -> None:
    assert parsed(max_tokens=5, max_completion_tokens=5).sampling.max_tokens == 5
    assert refused(max_tokens=5, max_completion_tokens=6).body.param == "max_tokens"
    assert refused(max_tokens=5, min_tokens=6).body.param == "min_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 999999),
        ("temperature", -1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.0001),
        ("top_p", float("nan")),
        ("top_k", 0.01),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("n", 0),
        ("n", 9),
        ("n", "2"),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.1),
        ("logprobs", 1),
        ("top_logprobs", 5),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", [""]),
        ("stop", ""),
        ("stop", [1]),
        ("stop", {}),
        ("stop", "x" * 257),
        ("logit_bias", []),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1.0": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": float("nan")}),
        ("logit_bias", {"1": "2"}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {str(i): 1 for i in range(MAX_BIASED_TOKENS + 1)}),
        ("ignore_eos", "yes"),
        ("min_tokens", -1),
        ("stream", "true"),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("user", 5),
        ("user", "x" * 513),
        ("metadata", {"a": 1}),
        ("metadata", {"a": "x" * 513}),
        ("metadata", "x"),
        ("conversation_id", "a:b"),
        ("conversation_id", ""),
        ("conversation_id", "{x}"),
        ("conversation_id", 7),
        ("response_format", "json"),
    ],
)
def test_c5_c10_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    error = refused(**{field: value})
    assert (error.status, error.body.param) == (400, field)
    assert error.body.code == "invalid_value"
    assert "nan" not in error.body.message.lower()


def test_top_logprobs_need_logprobs() -> None:
    assert parsed(logprobs=True).sampling.top_logprobs == 0
    assert parsed(logprobs=True, top_logprobs=20).sampling.top_logprobs == 20
    assert parsed(logprobs=False).sampling.top_logprobs is None
    assert refused(logprobs=True, top_logprobs=21).body.param == "top_logprobs"
    assert refused(logprobs=False, top_logprobs=1).body.param == "top_logprobs"


def test_sampling_parameters_reach_the_record() -> None:
    fields = {
        "temperature": 0,
        "top_p": 1,
        "n": 2,
        "stop": "END",
        "max_completion_tokens": 7,
        "min_tokens": 7,
        "seed": -(2**63),
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -100, "0": 1.5},
        "top_k": -1,
        "min_p": 0.5,
        "ignore_eos": True,
    }
    sampling = parsed(**fields, stream=True, stream_options={"include_usage": True}).sampling
    assert sampling.model_dump(exclude_defaults=True) == {
        "temperature": 0.0,
        "n": 2,
        "stop": ["END"],
        "max_tokens": 7,
        "min_tokens": 7,
        "seed": -(2**63),
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.5,
        "logit_bias": {5: -100.0, 0: 1.5},
        "min_p": 0.5,
        "ignore_eos": True,
    }


def test_response_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert parsed(response_format={"type": "text"}).sampling.json_schema is None
    assert parsed(response_format={"type": "json_object"}).sampling.json_schema == {"type": "object"}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert parsed(response_format=wanted).sampling.json_schema == schema


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"a": schema}
    return schema


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"type": "yaml"}, "response_format.type"),
        ({}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": []}}, "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": _nested(MAX_SCHEMA_DEPTH + 1)}},
            "response_format.json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {"a": "x" * MAX_SCHEMA_BYTES}}},
            "response_format.json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {"\ud83d": 1}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_bad_response_formats_are_refused_by_name(wanted: Any, param: str) -> None:
    assert refused(response_format=wanted).body.param == param


LONE = "hi \ud83d"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": LONE}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": LONE}]}]},
            "messages[0].content[0].text",
        ),
        ({"messages": [{"role": "user", "content": "x", "name": LONE}]}, "messages[0].name"),
        ({"messages": [{"role": LONE, "content": "x"}]}, "messages[0].role"),
        ({"stop": LONE}, "stop"),
        ({"user": LONE}, "user"),
        ({"metadata": {"a": LONE}}, "metadata"),
        ({"metadata": {LONE: "a"}}, "metadata"),
        ({"conversation_id": LONE}, "conversation_id"),
    ],
)
def test_a11_lone_surrogates_stop_at_the_door(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.status, error.body.param) == (400, param)


def test_a11_a_lone_surrogate_as_model_is_an_unknown_model() -> None:
    assert refused(model=LONE).status == 404


def test_c11_unknown_fields_are_ignored() -> None:
    assert parsed(parallel_tool_calls=True, service_tier="auto", foo=1) == parsed()


@pytest.mark.parametrize("body", [[], "x", None, 5, [1]])
def test_c10_a_body_that_is_no_object_is_refused(body: object) -> None:
    with pytest.raises(ApiError) as raised:
        parse_chat_request(body, SETTINGS, PAID)
    assert raised.value.status == 400


def test_more_choices_than_a_worker_runs_are_refused() -> None:
    raw = development("sim").model_dump(mode="json")
    raw["worker"]["max_seqs"] = 2
    few = Settings.model_validate(raw)
    with pytest.raises(ApiError) as raised:
        parse_chat_request({"model": "default", "messages": USER, "n": 3}, few, PAID)
    assert raised.value.body.param == "n"


_FIELDS = st.sampled_from(
    [
        "model",
        "messages",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "stop",
        "max_tokens",
        "min_tokens",
        "seed",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "response_format",
        "stream",
        "stream_options",
        "conversation_id",
        "user",
        "metadata",
        "tools",
        "audio",
        "x",
    ]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | _FIELDS, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(_FIELDS, _VALUES, max_size=6))
def test_any_body_is_accepted_or_refused_in_the_apis_shape(fields: dict[str, Any]) -> None:
    body = {"model": "default", "messages": USER, **fields}
    result = parse_or_refusal(body)
    if isinstance(result, ApiError):
        assert result.status in (400, 403, 404)
        json.dumps(result.body.model_dump()).encode()
    else:
        result.sampling.model_dump_json().encode()


def parse_or_refusal(body: object) -> ChatRequest | ApiError:
    try:
        return parse_chat_request(body, SETTINGS, PAID)
    except ApiError as error:
        return error


def test_the_grace_time_is_the_tiers_unless_the_body_says_otherwise_d1() -> None:
    assert parsed().leave_grace_ms == 30_000
    assert parsed(leave_grace_seconds=None).leave_grace_ms == 30_000
    assert parsed(leave_grace_seconds=0).leave_grace_ms == 0
    assert parsed(leave_grace_seconds=0.25).leave_grace_ms == 250
    assert parsed(leave_grace_seconds=3600).leave_grace_ms == 3_600_000
    batch = Principal(key_id="b", tenant="b", tier="batch")
    request = parse_chat_request({"model": "default", "messages": USER}, SETTINGS, batch)
    assert request.leave_grace_ms is None


@pytest.mark.parametrize("value", [-1, 3600.5, "0", True, [], {}])
def test_a_grace_time_out_of_range_is_refused_by_name(value: object) -> None:
    assert refused(leave_grace_seconds=value).body.param == "leave_grace_seconds"


def test_only_what_asks_for_it_is_kept_with_what_it_gave_B10() -> None:
    for fields in ({}, {"store": None}, {"store": False, "metadata": {"a": "b"}}):
        assert parsed(**fields).keep is None
    keep = parsed(store=True, metadata=None, temperature=0.0, top_p=None).keep
    assert keep is not None
    assert (keep.kind, keep.metadata, keep.params) == ("chat.completion", {}, {"temperature": 0.0})
    assert refused(store="yes").body.param == "store"
    assert refused(store=True, metadata={"a": "\ud83d"}).body.param == "metadata"
