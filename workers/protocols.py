"""The seams of a worker: the engine that generates, and how its tokens become text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from contracts.records import Sampling
from contracts.tiers import FinishReason


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One attempt at a reply, as an engine sees it.

    Attributes:
        engine_id: unique per attempt (``<request id>/<attempt>``).
        prompt_token_ids: the prompt.
        emitted_token_ids: output tokens an earlier attempt has already shown (only with ``n`` = 1); the
            engine goes on after them and does not yield them again.
        sampling: ``max_tokens`` is the budget of the whole reply, emitted tokens included.
        priority: lower runs first.
        cache_salt: keeps tenants' prefix caches apart.
        shared_tokens: of the prompt's tokens, the first so many belong to a prompt that the operator has
            declared shareable: in the KV tier they are the same for all tenants.
    """

    engine_id: str
    prompt_token_ids: Sequence[int]
    emitted_token_ids: Sequence[int]
    sampling: Sampling
    priority: int
    cache_salt: str
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one choice.

    Attributes:
        index: which choice.
        token_ids: one or more tokens, in order; may be empty when only ``finish_reason`` is news.
        logprobs: one object per token in the OpenAI API's ``logprobs.content`` shape; None unless asked.
        finish_reason: set on the choice's last delta (``stop`` = end of sequence, ``length`` = budget).
        cached_tokens: prompt tokens that came from a cache, where the engine knows.
    """

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[dict[str, Any]] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """Room of an engine: choices at once, and KV cache in tokens (0 total = not known)."""

    max_seqs: int
    running: int
    kv_tokens_total: int = 0
    kv_tokens_free: int = 0


@dataclass(frozen=True, slots=True)
class TierNews:
    """What an engine has learned of the KV tier that it shares with others. Hints, as the tier forgets.

    Attributes:
        held / missing: prefix hashes (:mod:`kv.layout`) that it has found or stored there / has looked for in
            vain, since it was last asked; none is in both. Of one prompt, its start comes first.
        load_us_per_token / prefill_us_per_token: what a token takes to load from the tier / to prefill,
            microseconds, as measured lately; None = not measured yet.
    """

    held: list[str]
    missing: list[str]
    load_us_per_token: float | None = None
    prefill_us_per_token: float | None = None


class Detokenizer(Protocol):
    """Turns the tokens of one choice into text, whole characters only."""

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is incomplete. Never raises on bytes
        that are no UTF-8: they become U+FFFD once no continuation can repair them.
        """

    def finish(self) -> str:
        """Nothing more comes: the rest of the text. An incomplete character at its end is dropped, by
        rule the same on every path (streamed, stored, resumed).
        """


class Engine(Protocol):
    """A model that generates replies, many at once.

    An engine knows nothing of Kafka, Redis or requests' owners. Stop strings are not its business:
    the worker finds them in the text and closes the iterator.
    """

    async def start(self) -> None:
        """Load the model; raises :class:`workers.errors.EngineDead` when it cannot."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Generate a reply. Deltas of a choice come in order; choices interleave.

        Closing or cancelling the iterator aborts the request in the engine and frees its room.

        Raises:
            workers.errors.RequestFailed: this request cannot be done; others are unaffected.
            workers.errors.EngineDead: the engine is gone, and all its requests with it.
        """

    def detokenizer(self, request: EngineRequest) -> Detokenizer:
        """A new detokenizer for one choice of ``request``, primed with its prompt and emitted tokens, of
        which no text ever comes out.
        """

    def continues(self, sampling: Sampling) -> bool:
        """Whether it can go on after emitted tokens as if it had generated them itself: with the same
        distribution over every token that follows. Draws of ``temperature`` > 0 may differ.
        """

    def capacity(self) -> Capacity:
        """Room right now; cheap, never blocks."""

    def take_tier_news(self, limit: int) -> TierNews | None:
        """What it has learned of its KV tier since it was last asked, at most ``limit`` hashes; the rest
        stays for later, as far as there is room for it. None = it has no tier. Cheap, never blocks.
        """

    async def check(self) -> None:
        """Raise :class:`workers.errors.EngineDead` if the engine can no longer generate."""

    async def close(self) -> None:
        """Stop and free everything; idempotent."""
