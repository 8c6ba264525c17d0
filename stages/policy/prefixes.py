"""Which workers hold which prefixes, as their events tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kv.layout import CHUNK_TOKENS

#: Chunks remembered per worker (4 million tokens); the longest known are forgotten first.
PREFIXES_PER_WORKER = 16_384


class PrefixIndex:
    """Hints: what it says may be out of date, which costs a cache hit.

    Hashes are chained and caches drop the end of a prefix first, so who holds a chunk is taken to hold
    those before it, and the longest held prefix can be found by bisection.
    """

    def __init__(self) -> None:
        self._of_worker: dict[str, dict[str, None]] = {}
        self._holders: dict[str, dict[str, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._holders)

    def update(self, worker_id: str, gained: Sequence[str], gone: Sequence[str]) -> None:
        """A worker has come to hold and has dropped these."""
        held = self._of_worker.get(worker_id)
        if held is None:
            if not gained:
                return
            held = self._of_worker[worker_id] = {}
        for name in gone:
            if name in held:
                del held[name]
                self._drop(worker_id, name)
        for name in gained:
            if name not in held:
                held[name] = None
                self._holders.setdefault(name, {})[worker_id] = None
        while len(held) > PREFIXES_PER_WORKER:
            name = next(iter(held))
            del held[name]
            self._drop(worker_id, name)

    def expect(self, worker_id: str, hashes: Sequence[str]) -> None:
        """A worker was given a prompt with these: it will hold them soon, if it is one that tells."""
        if hashes and worker_id in self._of_worker:
            self.update(worker_id, hashes, ())

    def forget(self, worker_id: str) -> None:
        """A worker is gone."""
        for name in self._of_worker.pop(worker_id, {}):
            self._drop(worker_id, name)

    def held_tokens(self, worker_id: str, hashes: Sequence[str]) -> int:
        """Tokens of the longest prefix of a prompt that a worker holds."""
        held = self._of_worker.get(worker_id)
        return CHUNK_TOKENS * _longest(hashes, held) if held else 0

    def longest(self, hashes: Sequence[str]) -> int:
        """Tokens of the longest prefix of a prompt that any worker holds."""
        return CHUNK_TOKENS * _longest(hashes, self._holders)

    def holders(self, hashes: Sequence[str]) -> Iterator[str]:
        """Workers that hold a prefix of a prompt, those with the longest first; one may come again."""
        for end in range(_longest(hashes, self._holders), 0, -1):
            yield from self._holders[hashes[end - 1]]

    def _drop(self, worker_id: str, name: str) -> None:
        holders = self._holders[name]
        del holders[worker_id]
        if not holders:
            del self._holders[name]


def _longest(hashes: Sequence[str], held: dict[str, None] | dict[str, dict[str, None]]) -> int:
    """Chunks of the longest prefix whose last one is in ``held``."""
    if not hashes or hashes[0] not in held:
        return 0
    low, high = 1, len(hashes)
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low
