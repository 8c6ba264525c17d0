"""Everything in a chat completion body but ``model`` and ``messages``: types, ranges and bounds.

The types are strict (``5.0`` and ``"5"`` are no integers), an explicit null means absent, and unknown fields
are ignored. Validators raise fixed sentences, so that no value of a request reaches an error message.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from contracts.identity import USER_NAME_PATTERN, is_user_name
from infra.settings import MAX_LEAVE_GRACE_SECONDS

from .chat_messages import is_unicode
from .metadata import Metadata
from .refusals import invalid, refused_field

MAX_STOPS: Final = 4
MAX_STOP_CHARACTERS: Final = 256
MAX_BIASED_TOKENS: Final = 1_024
MAX_SCHEMA_BYTES: Final = 65_536
MAX_SCHEMA_DEPTH: Final = 32
MAX_CHOICES: Final = 8
_INT32: Final = 2**31 - 1
_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


def _stops(raw: object) -> list[str] | None:
    if raw is None or raw == []:
        return None
    stops = [raw] if isinstance(raw, str) else raw
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(
            isinstance(s, str) and 1 <= len(s) <= MAX_STOP_CHARACTERS and is_unicode(s) for s in stops
        )
    ):
        raise ValueError(
            f"must be a string or a list of at most {MAX_STOPS} strings, "
            f"each of 1 to {MAX_STOP_CHARACTERS} characters of Unicode text."
        )
    return stops


def _bias(raw: object) -> dict[int, float] | None:
    if raw is None:
        return None
    if not isinstance(raw, dict) or len(raw) > MAX_BIASED_TOKENS:
        raise ValueError(f"must be an object with at most {MAX_BIASED_TOKENS} token ids.")
    bias: dict[int, float] = {}
    for token, value in raw.items():
        if not isinstance(token, str) or not _TOKEN_ID.fullmatch(token):
            raise ValueError("its keys must be token ids in decimal.")
        if type(value) not in (int, float) or not -100 <= value <= 100:
            raise ValueError("its values must be numbers from -100 to 100.")
        bias[int(token)] = float(value)
    return bias


def _depth(value: object, left: int) -> bool:
    """Whether ``value`` nests at most ``left`` levels deep."""
    if isinstance(value, dict):
        return left > 0 and all(_depth(v, left - 1) for v in value.values())
    if isinstance(value, list):
        return left > 0 and all(_depth(v, left - 1) for v in value)
    return True


def _schema(raw: object) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError("must be a JSON schema object.")
    if not _depth(raw, MAX_SCHEMA_DEPTH):
        raise ValueError(f"must nest at most {MAX_SCHEMA_DEPTH} levels deep.")
    try:
        size = len(orjson.dumps(raw))
    except orjson.JSONEncodeError:
        raise ValueError("must be a JSON schema of Unicode text and 64-bit numbers.") from None
    if size > MAX_SCHEMA_BYTES:
        raise ValueError(f"must be at most {MAX_SCHEMA_BYTES} bytes.")
    return raw


def _conversation(raw: object) -> object:
    if raw is not None and not is_user_name(raw):
        raise ValueError("must be 1 to 64 of A-Z a-z 0-9 _ -.")
    return raw


# What the fields with a validator of their own take, for the OpenAPI document.
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Stops = _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None
_TokenId = Annotated[str, Field(pattern=f"^({_TOKEN_ID.pattern})$")]
_Bias = Annotated[
    dict[_TokenId, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASED_TOKENS, json_schema_extra={"additionalProperties": False}),
]
_UserName = Annotated[str, Field(pattern=f"^{USER_NAME_PATTERN}$")]


class StrictBody(BaseModel):
    """A body, or a part of one, of which fields that are not known are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class _JsonSchema(StrictBody):
    json_schema: Annotated[dict[str, Any], BeforeValidator(_schema), Field(alias="schema")]


class _ResponseFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _StreamOptions(StrictBody):
    include_usage: bool | None = None


class ChatOptions(StrictBody):
    """The optional fields; None means absent."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_stops, json_schema_input_type=_Stops)] = None
    max_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    logit_bias: Annotated[
        dict[int, float] | None, BeforeValidator(_bias, json_schema_input_type=_Bias | None)
    ] = None
    ignore_eos: bool | None = None
    response_format: _ResponseFormat | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    conversation_id: Annotated[
        str | None, BeforeValidator(_conversation, json_schema_input_type=_UserName | None)
    ] = None
    leave_grace_seconds: Annotated[float, Field(ge=0, le=MAX_LEAVE_GRACE_SECONDS)] | None = None
    service_tier: Literal["auto", "default", "flex"] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    metadata: Metadata = None
    store: bool | None = None


def parse_options(body: dict[str, Any]) -> ChatOptions:
    """Validate the optional fields, each for itself and against each other.

    Raises:
        ApiError: 400 that names the field.
    """
    try:
        options = ChatOptions.model_validate(body)
    except ValidationError as error:
        raise refused_field(error) from None
    if options.stream_options is not None and not options.stream:
        raise invalid("stream_options", "is only allowed with 'stream': true.")
    if options.top_logprobs is not None and not options.logprobs:
        raise invalid("top_logprobs", "needs 'logprobs': true.")
    wanted = options.response_format
    if wanted is not None and wanted.type == "json_schema" and wanted.json_schema is None:
        raise invalid("response_format.json_schema", "is required with type json_schema.")
    return options
