"""Which prompt prefixes a worker's KV cache is likely to hold, and what of that is news. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kv.layout import CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class PrefixNews:
    """Prefix hashes that have come, and that have gone; none is in both."""

    come: list[str]
    gone: list[str]


class PrefixMemory:
    """The prefixes of the prompts prefilled last, as many as the KV cache has room for.

    The engine evicts by its own rules, and replies take room too, so this is a guess. It forgets the end of
    a prompt before its start, without which the end is of no use.
    """

    def __init__(self, kv_tokens: int) -> None:
        """A memory of full chunks (:data:`kv.layout.CHUNK_TOKENS`) for ``kv_tokens`` tokens; 0 = of none."""
        self._capacity = kv_tokens // CHUNK_TOKENS
        self._held: OrderedDict[str, None] = OrderedDict()
        self._come: dict[str, None] = {}
        self._gone: dict[str, None] = {}

    def __contains__(self, prefix: object) -> bool:
        return prefix in self._held

    def __len__(self) -> int:
        return len(self._held)

    def prefilled(self, hashes: Sequence[str]) -> None:
        """A prompt was prefilled; its chained hashes in order."""
        for prefix in reversed(hashes[: self._capacity]):
            if prefix not in self._held:
                self._held[prefix] = None
                self._again(prefix)
            self._held.move_to_end(prefix)
        while len(self._held) > self._capacity:
            prefix, _ = self._held.popitem(last=False)
            self._again(prefix)

    def take_news(self, limit: int) -> PrefixNews:
        """What has changed since it was last asked, at most ``limit`` hashes; the rest stays for later."""
        gone = _pop(self._gone, limit)
        return PrefixNews(_pop(self._come, limit - len(gone)), gone)

    def untold(self, news: PrefixNews) -> None:
        """News that may not have arrived: it is news again, as far as it still holds."""
        for prefix in (*news.come, *news.gone):
            self._again(prefix)

    def tell_all(self) -> None:
        """Somebody knows nothing yet: all that is held is news again, what was used last first."""
        later, self._come = self._come, {}
        for prefix in (*reversed(self._held), *later):
            self._again(prefix)

    def _again(self, prefix: str) -> None:
        """It is news where it stands now; what was not told of it before is not told any more."""
        if prefix in self._held:
            self._gone.pop(prefix, None)
            self._come[prefix] = None
        else:
            self._come.pop(prefix, None)
            self._gone[prefix] = None


def _pop(news: dict[str, None], limit: int) -> list[str]:
    found = list(news)[:limit] if len(news) > limit else list(news)
    for prefix in found:
        del news[prefix]
    return found
