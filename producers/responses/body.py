"""The body of a Responses call, validated and turned into the request a chat completion would make. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError

from contracts.errors import ApiError, ErrorCode
from contracts.identity import Principal
from contracts.keep import Keep
from contracts.records import Message
from infra.settings import MAX_LEAVE_GRACE_SECONDS, Settings

from ..chat_messages import MAX_MESSAGES, is_unicode
from ..chat_options import StrictBody
from ..chat_request import ChatRequest, parse_chat_request
from ..message_items import ITEM_SCHEMA, parse_items
from ..metadata import Metadata
from ..refusals import (
    Unsupported,
    invalid,
    refuse_unsupported,
    refused_field,
    unsupported_schemas,
)
from .ids import RESPONSE_ID_PATTERN, is_response_id

_UNSUPPORTED: Final[Unsupported] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "include": ([],),
    "reasoning": ({},),
    "prompt": (),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "max_tool_calls": (),
}
#: Sampling fields of chat completions that are taken here too, under the same names.
_PASSED_ON: Final = ("temperature", "top_p", "seed", "top_k", "min_p", "min_tokens", "ignore_eos")
#: What a chat completion calls a field of ours.
_CHAT_NAMES: Final = {
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
}


def _instructions(raw: object) -> object:
    if raw is not None and not (isinstance(raw, str) and is_unicode(raw)):
        raise ValueError("must be Unicode text.")
    return raw


def _previous(raw: object) -> object:
    if raw is not None and not is_response_id(raw):
        raise ValueError("must be the id of a response.")
    return raw


def _conversation(raw: object) -> object:
    named = raw.get("id") if isinstance(raw, dict) else raw
    if raw is not None and not isinstance(named, str):
        raise ValueError("must be the id of a conversation, or an object with it.")
    return named


class _Format(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    description: Annotated[str, Field(max_length=1_024)] | None = None
    strict: bool | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class _Text(StrictBody):
    format: _Format | None = None


class _ConversationName(StrictBody):
    id: str


class ResponseOptions(StrictBody):
    """The optional fields that are ours; None means absent."""

    instructions: Annotated[
        str | None, BeforeValidator(_instructions, json_schema_input_type=str | None)
    ] = None
    previous_response_id: Annotated[
        str | None,
        BeforeValidator(
            _previous,
            json_schema_input_type=Annotated[str, Field(pattern=f"^{RESPONSE_ID_PATTERN}$")] | None,
        ),
    ] = None
    conversation: Annotated[
        str | None,
        BeforeValidator(_conversation, json_schema_input_type=str | _ConversationName | None),
    ] = None
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: _Text | None = None
    metadata: Metadata = None
    user: Annotated[str, Field(max_length=512)] | None = None
    leave_grace_seconds: Annotated[float, Field(ge=0, le=MAX_LEAVE_GRACE_SECONDS)] | None = None


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """A valid call.

    Attributes:
        chat: the request; what comes before its messages is not in it yet.
        keep: as it is kept, or would be.
    """

    chat: ChatRequest
    keep: Keep
    instructions: str | None
    previous_response_id: str | None
    conversation_id: str | None
    background: bool
    stream: bool

    def request(self, earlier: list[Message]) -> ChatRequest:
        """The request as it goes into the pipeline.

        Args:
            earlier: of the responses that this one continues.
        """
        said = [Message(role="system", content=self.instructions)] if self.instructions else []
        return replace(self.chat, before=[*said, *earlier])


def response_body_schema() -> dict[str, Any]:
    """JSON schema of the bodies that :func:`parse_response_body` takes, for the OpenAPI document."""
    schema = ResponseOptions.model_json_schema(ref_template="#/components/schemas/{model}")
    items = {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": ITEM_SCHEMA}
    named = {
        "model": {"type": "string", "minLength": 1},
        "input": {"anyOf": [{"type": "string"}, items]},
    }
    return schema | {
        "title": "ResponseRequest",
        "description": "A response body. Fields that are not listed are ignored; null means absent.",
        "required": list(named),
        "properties": named | schema["properties"] | unsupported_schemas(_UNSUPPORTED),
    }


def parse_response_body(body: object, settings: Settings, principal: Principal) -> ResponseCall:
    """Validate a body.

    Raises:
        ApiError: 400 with ``param`` naming the field, 404 for an unknown model, 403 for one that is not
            for this tier.
    """
    if not isinstance(body, dict):
        raise ApiError(ErrorCode.INVALID_REQUEST, "The body must be a JSON object.")
    refuse_unsupported(body, _UNSUPPORTED)
    try:
        options = ResponseOptions.model_validate(body)
    except ValidationError as error:
        raise refused_field(error) from None
    if options.previous_response_id is not None and options.conversation is not None:
        raise invalid("previous_response_id", "cannot be combined with 'conversation'.")
    if options.background and options.store is False:
        raise invalid("background", "needs 'store': true.")
    messages = _input(body.get("input"))
    chat = _chat(body, options, messages, settings, principal)
    keep = _keep(options)
    grace_ms = None if options.background else chat.leave_grace_ms
    kept = keep if options.store is not False else None
    return ResponseCall(
        chat=replace(
            chat, keep=kept, leave_grace_ms=grace_ms, conversation_id=options.conversation, stream=False
        ),
        keep=keep,
        instructions=options.instructions,
        previous_response_id=options.previous_response_id,
        conversation_id=options.conversation,
        background=bool(options.background),
        stream=bool(options.stream),
    )


def _input(raw: object) -> list[Message]:
    if isinstance(raw, str):
        raw = [{"role": "user", "content": raw}]
    return parse_items(raw, "input", MAX_MESSAGES)


def _chat(
    body: dict[str, Any],
    options: ResponseOptions,
    messages: list[Message],
    settings: Settings,
    principal: Principal,
) -> ChatRequest:
    chat: dict[str, Any] = {field: body.get(field) for field in _PASSED_ON}
    chat |= {
        "model": body.get("model"),
        "max_completion_tokens": options.max_output_tokens,
        "response_format": _format(options),
        "leave_grace_seconds": options.leave_grace_seconds,
    }
    try:
        return parse_chat_request(chat, settings, principal, messages)
    except ApiError as error:
        raise _renamed(error) from None


def _format(options: ResponseOptions) -> dict[str, Any] | None:
    wanted = options.text.format if options.text is not None else None
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.json_schema is None:
        raise invalid("text.format.schema", "is required with type json_schema.")
    return {"type": "json_schema", "json_schema": {"schema": wanted.json_schema}}


def _renamed(error: ApiError) -> ApiError:
    """The error of a chat completion's field, by the name that the field has here."""
    param = error.body.param or ""
    for theirs, ours in _CHAT_NAMES.items():
        if param.startswith(theirs):
            message = error.body.message.replace(f"'{theirs}", f"'{ours}", 1)
            return ApiError(error.code, message, param=ours + param.removeprefix(theirs))
    return error


def _keep(options: ResponseOptions) -> Keep:
    echoed = {"instructions", "background", "max_output_tokens", "temperature", "top_p", "user"}
    params = options.model_dump(include=echoed, exclude_none=True)
    if options.text is not None and options.text.format is not None:
        params["format"] = options.text.format.model_dump(by_alias=True, exclude_none=True)
    return Keep(
        kind="response",
        metadata=options.metadata or {},
        params=params,
        previous_response_id=options.previous_response_id,
    )
