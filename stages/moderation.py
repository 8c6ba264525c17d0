"""Decisions of the moderation stage, without I/O: what is checked, whether it fits, what is queued."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.errors import ApiError, ErrorCode
from contracts.records import Message, QueuedRecord, RequestRecord, Sampling
from contracts.tiers import Status
from infra.settings import ModelSettings
from kv.layout import prefix_hashes

_CHECKED_ROLES = frozenset({"system", "developer", "user"})


def texts_to_check(messages: Sequence[Message]) -> list[str]:
    """What the moderators see: everything people wrote; the model's own replies are not checked again."""
    return [m.content for m in messages if m.role in _CHECKED_ROLES and m.content]


def resolve_max_tokens(sampling: Sampling, prompt_tokens: int, model: ModelSettings) -> int:
    """How many tokens each choice may have.

    Without a wish: ``default_max_tokens`` (or ``min_tokens``, if more), or what the context leaves.

    Raises:
        ApiError: ``context_length_exceeded``: the prompt and the wish do not fit together, or the prompt
            leaves no room for even one token.
    """
    limit = model.context_length
    room = limit - prompt_tokens
    asked = sampling.max_tokens if sampling.max_tokens is not None else sampling.min_tokens
    if room < 1:
        raise ApiError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages.",
            param="messages",
        )
    if asked > room:
        raise ApiError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{prompt_tokens + asked} tokens ({prompt_tokens} in the messages, {asked} in the completion). "
            "Please reduce the length of the messages or completion.",
            param="messages",
        )
    if sampling.max_tokens is not None:
        return sampling.max_tokens
    return min(max(model.default_max_tokens, sampling.min_tokens), room)


def queued_record(
    request: RequestRecord,
    prompt_token_ids: list[int],
    model: ModelSettings,
    now_ms: int,
    shared_tokens: int = 0,
) -> QueuedRecord:
    """What goes into the queue of the request's class.

    Args:
        shared_tokens: see :class:`stages.shared_prompts.SharedPrompts`.

    Raises:
        ApiError: ``context_length_exceeded``.
    """
    max_tokens = resolve_max_tokens(request.sampling, len(prompt_token_ids), model)
    if request.max_tokens_cap is not None:
        max_tokens = min(max_tokens, max(request.max_tokens_cap, request.sampling.min_tokens))
    carried = {name: getattr(request, name) for name in _CARRIED}
    # The parts are validated already, and token ids by the hundred are what validation would cost most on.
    return QueuedRecord.model_construct(
        **carried,
        sampling=request.sampling.model_copy(update={"max_tokens": max_tokens}),
        prompt_token_ids=prompt_token_ids,
        # The salt is the tenant as the server knows it, so that no tenant can name another's chunks.
        prefix_hashes=prefix_hashes(prompt_token_ids, request.tenant, shared_tokens=shared_tokens),
        shared_tokens=shared_tokens,
        moderated_ms=now_ms,
    )


_CARRIED = tuple(
    name
    for name in RequestRecord.model_fields
    if name not in {"messages", "sampling", "max_tokens_cap", "schema_version"}
)


def status_of(error: ApiError) -> Status:
    """How a request that is not let through ends: refused for what it asks, failed for what we cannot."""
    return Status.REFUSED if error.status < 500 else Status.FAILED
