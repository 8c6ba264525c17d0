"""Caches of simulated workers: chunks of tokens by name, least recently used go first."""

from __future__ import annotations

from collections.abc import Sequence

from kv.layout import CHUNK_TOKENS


class ChunkStore:
    """Which chunks are held: the KV tier that workers share, and the base of what each has of its own."""

    def __init__(self, tokens: int) -> None:
        """Make an empty one.

        Args:
            tokens: its room; less than a chunk holds nothing.
        """
        self._room = tokens // CHUNK_TOKENS
        self._held: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._held)

    def chunks_of(self, chunks: Sequence[str], prompt_tokens: int) -> int:
        """How many of a prompt's first full chunks are held."""
        hits = 0
        for name in chunks[: prompt_tokens // CHUNK_TOKENS]:
            if name not in self._held:
                break
            hits += 1
        return hits

    def cached_tokens(self, chunks: Sequence[str], prompt_tokens: int) -> int:
        """Tokens of a prompt that need no prefill; its last token always does, for the first output."""
        return min(self.chunks_of(chunks, prompt_tokens) * CHUNK_TOKENS, prompt_tokens - 1)

    def add(self, chunks: Sequence[str]) -> None:
        """These chunks were computed or used: they are the most recent now, the first of them most of all.

        The order makes the end of a prefix go before its start, without which the end is of no use.
        """
        held = self._held
        for name in reversed(chunks):
            if name in held:
                del held[name]
            else:
                self._comes(name)
            held[name] = None
        while len(held) > self._room:
            name = next(iter(held))
            del held[name]
            self._goes(name)

    def _comes(self, name: str) -> None:
        """A chunk is held from now on."""

    def _goes(self, name: str) -> None:
        """A chunk is held no longer."""


class PrefixCache(ChunkStore):
    """Which chunks a worker holds, and what has changed since that was last asked for."""

    def __init__(self, tokens: int) -> None:
        """See :class:`ChunkStore`."""
        super().__init__(tokens)
        self._new: dict[str, None] = {}
        self._gone: dict[str, None] = {}

    def changes(self) -> tuple[list[str], list[str]]:
        """Chunks that have come and that have gone since the last call."""
        changed = list(self._new), list(self._gone)
        self._new = {}
        self._gone = {}
        return changed

    def _comes(self, name: str) -> None:
        if name in self._gone:
            del self._gone[name]
        else:
            self._new[name] = None

    def _goes(self, name: str) -> None:
        if name in self._new:
            del self._new[name]
        else:
            self._gone[name] = None
