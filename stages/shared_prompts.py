"""System prompts that the operator declared shareable: their KV blocks serve all tenants."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from contracts.records import Message

from .errors import PromptRefused
from .protocols import PromptTokenizer

_SYSTEM_ROLES = ("system", "developer")


class SharedPrompts:
    """Knows how many of a prompt's tokens say nothing but a shareable prompt.

    Only what follows from the operator's own text counts, so that what tenants share tells none of them
    anything of another but that the prompt is in use.
    """

    def __init__(self, texts: Collection[str], tokenizers: Mapping[str, PromptTokenizer]) -> None:
        """Shareable prompts, each the whole content of a first message.

        Args:
            tokenizers: by model.
        """
        self._texts = frozenset(texts)
        self._tokenizers = tokenizers
        self._starts: dict[tuple[str, str, str], list[int]] = {}

    async def tokens_of(self, model: str, messages: Sequence[Message], token_ids: Sequence[int]) -> int:
        """How many tokens at the start of ``token_ids`` are of a shareable prompt; 0 = none."""
        first = messages[0] if messages else None
        if first is None or first.role not in _SYSTEM_ROLES or first.content not in self._texts:
            return 0
        start = await self._start(model, first)
        return _common(start, token_ids)

    async def _start(self, model: str, first: Message) -> list[int]:
        """The tokens that every prompt with this first message starts with."""
        key = model, first.role, first.content
        if key not in self._starts:
            encode = self._tokenizers[model].encode
            try:
                one, other = [
                    await encode([first, Message(role="user", content=text)]) for text in ("a", "b")
                ]
            except PromptRefused:
                return []
            self._starts[key] = one[: _common(one, other)]
        return self._starts[key]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))
