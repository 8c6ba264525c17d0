"""What one request takes from the KV tier, and what it gives to it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .layout import Chain, Chunk

#: The last chunks of a prompt at which a shorter run may end that an earlier turn has left.
_TAIL_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """A chunk to load, or its end.

    Attributes:
        chunk: which.
        skip_blocks: blocks at its start that are there already.
        block_ids: engine blocks for the rest.
    """

    chunk: Chunk
    skip_blocks: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """A chunk to save from these engine blocks."""

    chunk: Chunk
    block_ids: tuple[int, ...]


class RequestPlan:
    """One request's chunks: looked up when it comes, loaded before it is computed, saved as they fill.

    Attributes:
        prompt_tokens: of the request.
        hit_tokens: the longest prefix found in the tier, tokens.
    """

    def __init__(
        self, chain: Chain, prompt_tokens: int, *, block_tokens: int, chunk_tokens: int
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.hit_tokens = 0
        self._chain = chain
        self._block = block_tokens
        self._chunk = chunk_tokens
        self._asked: list[Chunk] = []
        self._found: list[Chunk] = []
        self._found_tokens = 0
        self._kept = 0
        self._tail_kept = 0
        self._prompt_tail_due = True

    def candidates(self, tokens: Sequence[int]) -> list[Chunk]:
        """All chunks that a prefix of ``tokens`` may be made of: to be looked up at once.

        The first ones are the full chunks, in order; the runs follow that may come after each of the last
        full ones.
        """
        full = len(tokens) // self._chunk
        self._asked = [self._chain.full(tokens, i) for i in range(full)]
        for index in range(max(0, full + 1 - _TAIL_CHUNKS), full + 1):
            start = index * self._chunk
            longest = min(len(tokens), start + self._chunk - 1)
            for end in range(start + self._block, longest + 1, self._block):
                self._asked.append(self._chain.tail(tokens, index, end))
        return self._asked

    def answered(self, present: Sequence[bool]) -> list[Chunk]:
        """What was found of the candidates; returns the full chunks that are there, in order."""
        there = [chunk for chunk, found in zip(self._asked, present, strict=True) if found]
        self._found = []
        end = 0
        for chunk in there:
            if chunk.full and chunk.start == end:
                self._found.append(chunk)
                end = chunk.end
        full = list(self._found)
        self._kept = len(full)
        self._found_tokens = end
        tails = [chunk for chunk in there if chunk.start == end]
        if tails:
            longest = max(tails, key=lambda chunk: chunk.end)
            self._found.append(longest)
            self._tail_kept = end = longest.end
        self.hit_tokens = end
        return full

    @property
    def missing(self) -> list[Chunk]:
        """The full chunks that were looked up and are of no use or not there."""
        return [chunk for chunk in self._asked if chunk.full and chunk.start >= self._found_tokens]

    def loads(self, local_tokens: int, block_ids: Sequence[int]) -> list[Load]:
        """How to get from ``local_tokens`` (whole blocks) to ``hit_tokens``.

        Args:
            block_ids: of the request, from its first token on.
        """
        loads = []
        for chunk in self._found:
            if chunk.end <= local_tokens:
                continue
            first = max(chunk.start, local_tokens) // self._block
            loads.append(
                Load(
                    chunk,
                    first - chunk.start // self._block,
                    tuple(block_ids[first : chunk.end // self._block]),
                )
            )
        return loads

    def lost(self, chunk: Chunk) -> None:
        """A chunk could not be loaded: it and what follows is computed, and may be saved again."""
        self._kept = min(self._kept, chunk.start // self._chunk)
        if self._tail_kept > chunk.start:
            self._tail_kept = 0
            self._prompt_tail_due = True

    def saves(self, tokens: Sequence[int], computed: int, block_ids: Sequence[int]) -> list[Save]:
        """Chunks that have become complete and are not in the tier; each is named once.

        Args:
            tokens: known ones, of prompt and reply.
            computed: tokens whose KV blocks are filled when this step has run.
            block_ids: of the request, from its first token on.
        """
        ready = min(computed, len(tokens))
        saves = []
        while (self._kept + 1) * self._chunk <= ready:
            saves.append(self._save(self._chain.full(tokens, self._kept), block_ids))
            self._kept += 1
        if self._prompt_tail_due and ready >= self.prompt_tokens:
            self._prompt_tail_due = False
            saves += self._tail(tokens, self.prompt_tokens, block_ids)
        return saves

    def complete(self, computed: int) -> bool:
        """Whether :meth:`saves` would have nothing more, without looking at tokens; cheap."""
        full = (self._kept + 1) * self._chunk > computed
        return full and not (self._prompt_tail_due and computed >= self.prompt_tokens)

    def last_saves(self, tokens: Sequence[int], computed: int, block_ids: Sequence[int]) -> list[Save]:
        """The same at the end of a reply, with the run that its last whole block ends."""
        saves = self.saves(tokens, computed, block_ids)
        return saves + self._tail(tokens, min(computed, len(tokens)), block_ids)

    def _tail(self, tokens: Sequence[int], until: int, block_ids: Sequence[int]) -> list[Save]:
        end = until // self._block * self._block
        index = end // self._chunk
        if end <= self._tail_kept or end == index * self._chunk or index > self._kept:
            return []
        self._tail_kept = end
        return [self._save(self._chain.tail(tokens, index, end), block_ids)]

    def _save(self, chunk: Chunk, block_ids: Sequence[int]) -> Save:
        return Save(chunk, tuple(block_ids[chunk.start // self._block : chunk.end // self._block]))
