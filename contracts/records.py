"""The Kafka records, each with a schema version.

Compatibility, tested both ways: unknown fields are ignored; a *newer* ``schema_version``, an unknown enum
value or bytes that are no record raise :class:`~contracts.errors.RecordError`, which sends the record to
the dead-letter topic. Nothing else leaves :func:`decode`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from .degraded import Degraded
from .errors import ErrorBody, RecordError
from .identity import is_request_id
from .keep import Keep
from .tiers import FinishReason, QueueClass, Status

SCHEMA_VERSION = 1


class Message(BaseModel):
    """One turn of a conversation, its content as plain text."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None


class Sampling(BaseModel):
    """Sampling parameters, already validated; what is absent takes the engine's neutral value.

    Attributes:
        max_tokens: output tokens per choice; None means as many as the context allows.
        min_tokens: output tokens before which neither end of sequence nor a stop string ends a choice.
        stop: strings that end a choice and are not part of it.
        top_logprobs: alternatives per token; None means no logprobs at all.
        logit_bias: token id to bias in [-100, 100].
        json_schema: JSON schema the reply must follow; ``{"type": "object"}`` for plain JSON mode.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    stop: list[str] = Field(default_factory=list)
    max_tokens: int | None = None
    min_tokens: int = 0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_logprobs: int | None = None
    logit_bias: dict[int, float] = Field(default_factory=dict)
    ignore_eos: bool = False
    json_schema: dict[str, Any] | None = None


class Usage(BaseModel):
    """Token counts as the OpenAI API reports them."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


class Record(BaseModel):
    """What every record has."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: ClassVar[int] = SCHEMA_VERSION
    schema_version: int = SCHEMA_VERSION
    request_id: str

    def encode(self) -> bytes:
        """UTF-8 JSON, non-ASCII unescaped."""
        return self.model_dump_json().encode()


class _Request(Record):
    """What a request carries all the way.

    Attributes:
        key_id: public id of the API key, never the key.
        model: canonical model name (aliases are resolved at the gateway).
        pool: worker group that serves the model.
        created_ms: acceptance, Unix milliseconds; also the order of turns.
        deadline_ms: Unix milliseconds after which a request that has not started is expired.
        turn: the messages this request adds to its conversation (without stored history).
        leave_grace_ms: how long it goes on without a reader; None = to its end.
        degraded: what it got less of because of overload; ``model`` and ``pool`` are those that serve it.
        keep: what is to be stored of it and its reply; None = nothing.
    """

    tenant: str
    key_id: str
    tier: str
    queue_class: QueueClass
    model: str
    pool: str
    created_ms: int
    deadline_ms: int
    conversation_id: str | None = None
    turn: list[Message] = Field(default_factory=list)
    leave_grace_ms: int | None = None
    degraded: Degraded | None = None
    keep: Keep | None = None
    sampling: Sampling


class RequestRecord(_Request):
    """``requests``: accepted by the gateway, not yet moderated.

    Attributes:
        messages: the whole prompt, stored history included.
        max_tokens_cap: a bound of the output tokens per choice beyond what was asked for; None = none.
    """

    messages: list[Message]
    max_tokens_cap: int | None = None


class QueuedRecord(_Request):
    """``queue.<class>``: moderated and tokenized, waiting for a worker.

    ``sampling.max_tokens`` is resolved (never None) from here on.

    Attributes:
        prompt_token_ids: the prompt under the model's chat template.
        prefix_hashes: chained hash of each full chunk of the prompt (see ``kv.layout``), hex.
        shared_tokens: of the prompt's tokens, the first so many say nothing but a system prompt that the
            operator declared shareable between tenants.
    """

    prompt_token_ids: list[int]
    prefix_hashes: list[str] = Field(default_factory=list)
    shared_tokens: int = 0
    moderated_ms: int


class DispatchRecord(QueuedRecord):
    """``dispatch.<pool>``: given to one worker.

    Attributes:
        attempt: which attempt at this reply the scheduler means (1 = first).
        worker_id: the worker it chose.
        dispatched_ms: Unix milliseconds.
        scheduler_id: who says so, for what the worker grants to each scheduler; empty = unknown.
    """

    attempt: int
    worker_id: str
    dispatched_ms: int
    scheduler_id: str = ""


class OutcomeChoice(BaseModel):
    """One choice of a finished reply."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    index: int
    text: str
    finish_reason: FinishReason | None = None


class OutcomeRecord(Record):
    """``outcomes``: how a request ended. At least once; idempotent by ``request_id``.

    Attributes:
        choices: the text that was out when the request was sealed; partial unless completed.
        attempts: how many workers started it.
        finished_ms: Unix milliseconds at which the record was made.
        degraded: what it got less of because of overload.
        keep: what is to be stored of it; None = nothing.
        ttft_ms / duration_ms: first token and end, after acceptance; None where there was none.
    """

    tenant: str
    key_id: str
    tier: str
    model: str
    conversation_id: str | None = None
    created_ms: int
    finished_ms: int
    turn: list[Message] = Field(default_factory=list)
    status: Status
    choices: list[OutcomeChoice] = Field(default_factory=list)
    usage: Usage = Field(default_factory=Usage)
    degraded: Degraded | None = None
    keep: Keep | None = None
    error: ErrorBody | None = None
    attempts: int = 0
    ttft_ms: int | None = None
    duration_ms: int | None = None


class DeadLetterRecord(BaseModel):
    """``deadletter``: a record that could not be handled, with where it came from and why.

    Attributes:
        payload_base64: the original bytes; the topic is as confidential as the one it came from.
    """

    schema_version: int = SCHEMA_VERSION
    topic: str
    partition: int
    offset: int
    stage: str
    reason: str
    detail: str
    request_id: str | None = None
    failed_ms: int
    payload_base64: str

    def encode(self) -> bytes:
        """UTF-8 JSON."""
        return self.model_dump_json().encode()


R = TypeVar("R", bound=Record)


def decode(kind: type[R], value: bytes | None) -> R:
    """Read a record.

    Raises:
        RecordError: the bytes are no JSON object (``malformed``), not a valid record (``invalid``), or
            of a schema this version does not know (``newer_schema``). Carries the request id if that
            much could be read. The detail names fields, never values.
    """
    try:
        raw = from_json(value or b"")
    except ValueError as error:
        raise RecordError("malformed", "not JSON") from error
    if not isinstance(raw, dict):
        raise RecordError("malformed", "not a JSON object")
    found = raw.get("request_id")
    request_id = found if is_request_id(found) else None
    version = raw.get("schema_version", 1)
    if type(version) is not int:
        raise RecordError("invalid", "schema_version is not an integer", request_id)
    if version > kind.version:
        raise RecordError("newer_schema", f"version {version}, this is {kind.version}", request_id)
    if request_id is None:
        raise RecordError("invalid", "request_id")
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        fields = sorted({".".join(str(p) for p in e["loc"][:2]) for e in error.errors()})
        raise RecordError("invalid", ", ".join(fields)[:200], request_id) from None
