"""Kept chat completions as the API shows them. Pure."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, ValidationError, with_config
from typing_extensions import TypedDict

from contracts.errors import ApiError, ErrorCode
from contracts.stored_reply import StoredReply
from streaming_edge.terminal import usage_object

from .api_shapes import ChatCompletion
from .metadata import Metadata
from .refusals import refused_field

_CLOSED = ConfigDict(extra="forbid")


@with_config(_CLOSED)
class StoredChatCompletion(ChatCompletion):
    """A kept completion, with what the caller attached and the parameters that the call gave."""

    metadata: dict[str, str]
    temperature: NotRequired[float]
    top_p: NotRequired[float]
    presence_penalty: NotRequired[float]
    frequency_penalty: NotRequired[float]
    seed: NotRequired[int]


@with_config(_CLOSED)
class StoredChatCompletionList(TypedDict):
    """A page of kept completions."""

    object: Literal["list"]
    data: list[StoredChatCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


@with_config(_CLOSED)
class StoredMessage(TypedDict):
    """One message of a kept completion's request; its text parts are joined by newlines."""

    id: str
    role: Literal["system", "developer", "user", "assistant"]
    content: str
    content_parts: None
    name: NotRequired[str]


@with_config(_CLOSED)
class StoredMessageList(TypedDict):
    """A page of a kept completion's messages."""

    object: Literal["list"]
    data: list[StoredMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool


@with_config(_CLOSED)
class ChatCompletionDeleted(TypedDict):
    """A kept completion is gone."""

    id: str
    object: Literal["chat.completion.deleted"]
    deleted: Literal[True]


class MetadataBody(BaseModel):
    """The body that replaces an object's metadata; null empties it."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, title="MetadataUpdate")

    metadata: Metadata


def parse_metadata_body(body: object) -> dict[str, str]:
    """The metadata of a body that replaces it.

    Raises:
        ApiError: 400 that names the field.
    """
    if not isinstance(body, dict):
        raise ApiError(ErrorCode.INVALID_REQUEST, "The body must be a JSON object.")
    try:
        return MetadataBody.model_validate(body).metadata or {}
    except ValidationError as error:
        raise refused_field(error) from None


def kept_fields(reply: StoredReply) -> dict[str, Any]:
    """What a kept completion shows beyond a completion."""
    return {**reply.params, "metadata": reply.metadata}


def stored_completion(reply: StoredReply) -> dict[str, Any]:
    """The ``chat.completion`` object of a kept reply that completed. Log probabilities are not kept."""
    less = {"degraded": reply.degraded.model_dump()} if reply.degraded is not None else {}
    return {
        "id": reply.id,
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "finish_reason": choice.finish_reason or "stop",
                "logprobs": None,
            }
            for choice in reply.choices
        ],
        "usage": usage_object(reply.usage),
        "system_fingerprint": None,
        **less,
        **kept_fields(reply),
    }


def stored_messages(reply: StoredReply) -> list[dict[str, Any]]:
    """The messages of a kept reply's request, in order, each with an id of its own."""
    return [
        {
            "id": f"{reply.id}-{index}",
            "role": message.role,
            "content": message.content,
            "content_parts": None,
            **({"name": message.name} if message.name is not None else {}),
        }
        for index, message in enumerate(reply.messages)
    ]


def metadata_filter(query: list[tuple[str, str]]) -> dict[str, str]:
    """The pairs of ``metadata[key]=value`` parameters.

    Raises:
        ApiError: 400.
    """
    if any(name == "metadata" for name, _ in query):
        raise ApiError(
            ErrorCode.INVALID_VALUE, "'metadata': write metadata[key]=value.", param="metadata"
        )
    pairs = {
        name[len("metadata[") : -1]: value
        for name, value in query
        if name.startswith("metadata[") and name.endswith("]")
    }
    return parse_metadata_body({"metadata": pairs})
