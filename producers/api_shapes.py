"""The answers of the HTTP API, as types for the OpenAPI document; the tests hold every answer to them.

They are closed: a field that is not listed is an error of the document.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from contracts.degraded import Degraded

_CLOSED = ConfigDict(extra="forbid")
FinishReasonName = Literal["stop", "length", "content_filter"]


@with_config(_CLOSED)
class PromptTokensDetails(TypedDict):
    """How many of the prompt's tokens were found in the KV cache."""

    cached_tokens: int


@with_config(_CLOSED)
class UsageObject(TypedDict):
    """Tokens that were used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@with_config(_CLOSED)
class ChoiceLogprobs(TypedDict):
    """Log probabilities of the tokens of a choice, or of a part of it."""

    content: list[dict[str, Any]]
    refusal: None


@with_config(_CLOSED)
class AssistantMessage(TypedDict):
    """The text of a choice."""

    role: Literal["assistant"]
    content: str
    refusal: None


@with_config(_CLOSED)
class CompletionChoice(TypedDict):
    """One reply of a completion."""

    index: int
    message: AssistantMessage
    finish_reason: FinishReasonName
    logprobs: ChoiceLogprobs | None


@with_config(_CLOSED)
class ChatCompletion(TypedDict):
    """A whole reply. ``id`` is the request id; ``degraded`` says what overload took from it."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject
    system_fingerprint: str | None
    degraded: NotRequired[Degraded]


@with_config(_CLOSED)
class Delta(TypedDict):
    """What a chunk adds to a choice."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


@with_config(_CLOSED)
class ChunkChoice(TypedDict):
    """The part of one choice that a chunk carries."""

    index: int
    delta: Delta
    finish_reason: FinishReasonName | None
    logprobs: NotRequired[ChoiceLogprobs | None]


@with_config(_CLOSED)
class ChatCompletionChunk(TypedDict):
    """One event of a streamed reply."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[UsageObject | None]


@with_config(_CLOSED)
class RequestStatus(TypedDict):
    """How a request ended; null while that is not known."""

    id: str
    object: Literal["chat.completion.status"]
    status: Literal["completed", "failed", "cancelled", "refused", "expired"] | None


@with_config(_CLOSED)
class ModelObject(TypedDict):
    """A model; ``root`` is the model that an alias stands for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str


@with_config(_CLOSED)
class ModelList(TypedDict):
    """Every name that the caller may use, aliases included."""

    object: Literal["list"]
    data: list[ModelObject]


@with_config(_CLOSED)
class Alive(TypedDict):
    """The process answers."""

    status: Literal["ok"]


@with_config(_CLOSED)
class Readiness(TypedDict):
    """Whether requests can be taken right now, or why not."""

    ready: bool
    reason: str | None
