"""A chat completion body, validated: the one function that HTTP and the websocket share.

Decided here: unknown fields are ignored; a null field is an absent one; ``max_completion_tokens`` and
``max_tokens`` may both be given when they agree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Final

from contracts.errors import ApiError, ErrorCode
from contracts.identity import Principal
from contracts.keep import Keep
from contracts.records import Message, Sampling
from infra.settings import ModelSettings, Settings, TierSettings

from .chat_messages import MESSAGES_SCHEMA, parse_messages
from .chat_options import ChatOptions, parse_options
from .refusals import Unsupported, invalid, refuse_unsupported, unsupported_schemas

_UNSUPPORTED: Final[Unsupported] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
}
#: Parameters that a stored completion shows again.
ECHOED_PARAMETERS: Final = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
#: Model names that are safe to repeat in a message.
_PRINTABLE_MODEL: Final = re.compile(r"[A-Za-z0-9._:/@-]{1,64}", re.ASCII)


def chat_body_schema() -> dict[str, Any]:
    """JSON schema of the bodies that :func:`parse_chat_request` takes, for the OpenAPI document."""
    schema = ChatOptions.model_json_schema(ref_template="#/components/schemas/{model}")
    named = {"model": {"type": "string", "minLength": 1}, "messages": MESSAGES_SCHEMA}
    return schema | {
        "title": "ChatCompletionRequest",
        "description": "A chat completion body. Fields that are not listed are ignored; null means absent.",
        "required": list(named),
        "properties": named | schema["properties"] | unsupported_schemas(_UNSUPPORTED),
    }


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A valid request of someone who may make it.

    Attributes:
        model: canonical name.
        messages: what the body holds, stored history not included.
        before: what goes before that and the stored history, and is stored with neither.
        stream: whether the client asked for a stream (HTTP only; the websocket always streams).
        include_usage: whether the stream ends with a usage chunk.
        leave_grace_ms: how long it goes on without a reader; None = to its end.
        keep: what is to be stored of it; None = nothing.
        flex: whether it waits as the lines of batches do.
    """

    model: str
    model_settings: ModelSettings
    messages: list[Message]
    sampling: Sampling
    stream: bool
    include_usage: bool
    conversation_id: str | None
    leave_grace_ms: int | None
    keep: Keep | None = None
    flex: bool = False
    before: list[Message] = field(default_factory=list)


def parse_chat_request(
    body: object,
    settings: Settings,
    principal: Principal,
    messages: list[Message] | None = None,
) -> ChatRequest:
    """Validate a chat completion body.

    Args:
        body: decoded JSON.
        messages: valid ones, instead of the body's.
        settings: which models there are.
        principal: who asks; its tier decides which models it may use.

    Raises:
        ApiError: 400 with ``param`` naming the field, 404 for an unknown model, 403 for one that is not
            for this tier.
    """
    if not isinstance(body, dict):
        raise ApiError(ErrorCode.INVALID_REQUEST, "The body must be a JSON object.")
    name, model = resolve_model(body.get("model"), settings, principal)
    refuse_unsupported(body, _UNSUPPORTED)
    if messages is None:
        messages = parse_messages(body.get("messages"))
    options = parse_options(body)
    return ChatRequest(
        model=name,
        model_settings=model,
        messages=messages,
        sampling=_sampling(options, model, settings),
        stream=bool(options.stream),
        include_usage=options.stream_options is not None and bool(options.stream_options.include_usage),
        conversation_id=options.conversation_id,
        leave_grace_ms=_leave_grace_ms(options, settings, principal),
        keep=_keep(options),
        flex=_flex(options, settings, principal),
    )


def resolve_model(wanted: object, settings: Settings, principal: Principal) -> tuple[str, ModelSettings]:
    """Canonical name and settings of the model a client names.

    Raises:
        ApiError: see :func:`parse_chat_request`. The name is repeated only when it is short and plain.
    """
    if not isinstance(wanted, str) or not wanted:
        raise invalid("model", "must be the name of a model.")
    found = settings.resolve_model(wanted)
    if found is None:
        named = f" '{wanted}'" if _PRINTABLE_MODEL.fullmatch(wanted) else ""
        raise ApiError(
            ErrorCode.MODEL_NOT_FOUND,
            f"The model{named} does not exist or you do not have access to it.",
            param="model",
        )
    if not may_use(found[1], principal):
        raise ApiError(ErrorCode.MODEL_NOT_ALLOWED, "Your tier may not use this model.", param="model")
    return found


def tier_of(settings: Settings, principal: Principal) -> TierSettings:
    """The settings of the caller's tier.

    Raises:
        ApiError: the tier was taken out of the configuration after the caller was let in.
    """
    tier = settings.tiers.get(principal.tier)
    if tier is None:
        raise ApiError(ErrorCode.INVALID_API_KEY, "The API key is no longer valid.")
    return tier


def counted_as(settings: Settings, principal: Principal, request: ChatRequest) -> Principal:
    """Whom a request counts for: its caller; with ``flex`` in the tier that lines of a batch count as."""
    tier = settings.line_tier(principal.tier) if request.flex else None
    return principal if tier is None else replace(principal, tier=tier)


def may_use(model: ModelSettings, principal: Principal) -> bool:
    """Whether a model is for the caller's tier."""
    return model.serves(principal.tier)


def _sampling(options: ChatOptions, model: ModelSettings, settings: Settings) -> Sampling:
    limit = _max_tokens(options, model)
    least = options.min_tokens or 0
    if least > (limit if limit is not None else model.context_length):
        raise invalid("min_tokens", "must not be larger than the limit of output tokens.")
    if (options.n or 1) > settings.worker.max_seqs:
        raise invalid("n", f"must be at most {settings.worker.max_seqs}.")
    given: dict[str, Any] = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": max(0, options.top_k) if options.top_k is not None else None,
        "min_p": options.min_p,
        "n": options.n,
        "stop": options.stop,
        "seed": options.seed,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "repetition_penalty": options.repetition_penalty,
        "top_logprobs": (options.top_logprobs or 0) if options.logprobs else None,
        "logit_bias": options.logit_bias,
        "ignore_eos": options.ignore_eos,
        "json_schema": _json_schema(options),
    }
    present = {name: value for name, value in given.items() if value is not None}
    return Sampling(max_tokens=limit, min_tokens=least, **present)


def _keep(options: ChatOptions) -> Keep | None:
    if not options.store:
        return None
    params = options.model_dump(include=set(ECHOED_PARAMETERS), exclude_none=True)
    return Keep(kind="chat.completion", metadata=options.metadata or {}, params=params)


def _flex(options: ChatOptions, settings: Settings, principal: Principal) -> bool:
    if options.service_tier != "flex":
        return False
    if settings.line_tier(principal.tier) is None:
        raise invalid("service_tier", "flex is not offered: there is no tier of class batch.")
    return True


def _leave_grace_ms(options: ChatOptions, settings: Settings, principal: Principal) -> int | None:
    seconds = options.leave_grace_seconds
    if seconds is None:
        seconds = tier_of(settings, principal).leave_grace_seconds
    return int(seconds * 1000) if seconds is not None else None


def _max_tokens(options: ChatOptions, model: ModelSettings) -> int | None:
    first, second = options.max_completion_tokens, options.max_tokens
    if first is not None and second is not None and first != second:
        raise invalid("max_tokens", "differs from 'max_completion_tokens'; give one of them.")
    limit = first if first is not None else second
    if limit is not None and limit > model.context_length:
        param = "max_completion_tokens" if first is not None else "max_tokens"
        raise invalid(param, f"must be at most {model.context_length}, the model's context length.")
    return limit


def _json_schema(options: ChatOptions) -> dict[str, Any] | None:
    wanted = options.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object" or wanted.json_schema is None:
        return {"type": "object"}
    return wanted.json_schema.json_schema
