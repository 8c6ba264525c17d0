"""Which workers hold which prefixes, and what the KV tier that they share holds, as their events tell."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from kv.layout import CHUNK_TOKENS

#: Chunks remembered per worker (4 million tokens); the longest known are forgotten first.
PREFIXES_PER_WORKER = 16_384
#: Chunks of the KV tier remembered per pool (16.8 million tokens); the longest unused are forgotten first.
TIER_PREFIXES = 65_536


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


class TierIndex:
    """The prefixes in the KV tier of a pool's workers. Hints, as in :class:`PrefixIndex`.

    What it says is what any of them has found or stored there last; the tier itself tells nothing when it
    evicts, so a prefix that is gone is believed to be there until a worker looks for it in vain.
    """

    def __init__(self, room: int = TIER_PREFIXES) -> None:
        """An empty one that remembers ``room`` chunks."""
        self._room = room
        self._held: OrderedDict[str, None] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def update(self, found: Sequence[str], missing: Sequence[str]) -> None:
        """A worker has found or stored these there, and has looked for these in vain."""
        held = self._held
        for name in missing:
            held.pop(name, None)
        # The start of a prompt is used last, so that its end, useless without it, is forgotten first.
        for name in reversed(found):
            held[name] = None
            held.move_to_end(name)
        while len(held) > self._room:
            held.popitem(last=False)

    def expect(self, hashes: Sequence[str]) -> None:
        """A prompt with these was given to a worker: it will load or store them soon, if any worker does."""
        if hashes and self._held:
            self.update(hashes, ())

    def held_tokens(self, hashes: Sequence[str]) -> int:
        """Tokens of the longest prefix of a prompt that is there."""
        return CHUNK_TOKENS * _longest(hashes, self._held)


def _longest(hashes: Sequence[str], held: Mapping[str, object]) -> int:
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
