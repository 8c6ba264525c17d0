"""A request as the simulator knows it: with what no scheduler knows, the length of its reply."""

from __future__ import annotations

from typing import NamedTuple

from kv.layout import CHUNK_TOKENS


class SimRequest(NamedTuple):
    """One request of a load or a trace.

    Attributes:
        at_ms: when it joins its line, milliseconds from the start.
        prompt_tokens: length of its prompt, conversation included.
        output_tokens: length its reply will have.
        max_tokens: length it asks for at most, which is what the scheduler is told.
        chunks: names of the chunks of prompt and reply (:data:`kv.layout.CHUNK_TOKENS` tokens each) in
            order; equal names mean equal tokens from the start. A last chunk that is not full has none.
        conversation_id: None outside conversations.
    """

    at_ms: float
    request_id: str
    tier: str
    tenant: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    chunks: tuple[str, ...] = ()
    conversation_id: str | None = None

    @property
    def prefix_hashes(self) -> tuple[str, ...]:
        """Names of the full chunks of its prompt, as in :class:`stages.protocols.Job`."""
        return self.chunks[: self.prompt_tokens // CHUNK_TOKENS]
