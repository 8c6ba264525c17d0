"""A simulated worker's way to the KV tier in Redis that all workers share."""

from __future__ import annotations

from collections.abc import Sequence

from kv.layout import CHUNK_TOKENS

from .prefix_cache import ChunkStore


class TierLink:
    """Loads and saves of one worker: loads come one after the other, beside its steps; saves take no time.

    Attributes:
        store: what the tier holds; all workers have the same.
        load_ms: what each token takes to load.
    """

    def __init__(self, store: ChunkStore, load_ms: float) -> None:
        self.store = store
        self.load_ms = load_ms
        self._free_ms = 0.0
        #: By name, whether it was there when it was last looked for or saved.
        self._news: dict[str, bool] = {}

    def load(
        self, chunks: Sequence[str], prompt_tokens: int, held: int, now_ms: float
    ) -> tuple[int, float]:
        """Look a prompt up, and begin to load what the worker lacks of it.

        Args:
            held: tokens of the prompt that the worker holds.

        Returns:
            Tokens that are loaded, and when they are there.
        """
        wanted = chunks[: prompt_tokens // CHUNK_TOKENS]
        found = self.store.chunks_of(wanted, prompt_tokens)
        self.store.add(wanted[:found])
        self._news.update((name, place < found) for place, name in enumerate(wanted))
        tokens = min(found * CHUNK_TOKENS, prompt_tokens - 1) - held
        if tokens <= 0:
            return 0, now_ms
        self._free_ms = max(self._free_ms, now_ms) + tokens * self.load_ms
        return tokens, self._free_ms

    def save(self, chunks: Sequence[str]) -> None:
        """Chunks were computed."""
        self.store.add(chunks)
        self._news.update(dict.fromkeys(chunks, True))

    def news(self) -> tuple[list[str], list[str]]:
        """What was found or saved there, and what was missing, since the last call."""
        news, self._news = self._news, {}
        return [name for name, there in news.items() if there], [
            name for name, there in news.items() if not there
        ]
