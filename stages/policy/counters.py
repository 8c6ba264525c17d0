"""Virtual counters: who has been served least, relative to a weight.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
(https://arxiv.org/abs/2401.00588), for any kind of customer: here classes of a pool, and tenants of a class.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K")

#: Customers that are remembered before it is first looked through whether all need be.
_SPARE = 64


class VirtualCounters(Generic[K]):
    """A counter per customer, and the active customers in order of their counters.

    A counter only rises. So the heap holds each active customer once, with a value that may be out of
    date and then too low: it is corrected when it comes to the top.
    """

    def __init__(self, weight: Callable[[K], float]) -> None:
        """Make an empty set.

        Args:
            weight: what a customer's charges are divided by; positive. Asked at each charge.
        """
        self._weight = weight
        self._values: dict[K, float] = {}
        self._entry: dict[K, int] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._entries = count()
        self._left = 0.0
        self._most = _SPARE

    def __getitem__(self, key: K) -> float:
        return self._values.get(key, self._left)

    def activate(self, key: K, at_least: float = 0.0) -> None:
        """A customer has work again. Its counter is lifted: having been away earns nothing.

        It is lifted to the lowest of the active ones, or, where there is none, to that of the last one
        that was active. An active customer stays as it is.

        Args:
            at_least: lift it to this, if that is more.
        """
        if key in self._entry:
            return
        first = self.lowest()
        floor = self._left if first is None else self._values[first]
        value = self._values[key] = max(self._values.get(key, 0.0), floor, at_least)
        entry = self._entry[key] = next(self._entries)
        heapq.heappush(self._heap, (value, entry, key))

    def deactivate(self, key: K) -> None:
        """A customer has no more work."""
        if self._entry.pop(key, None) is not None:
            self._left = self._values[key]

    def charge(self, key: K, tokens: float) -> None:
        """Count a service to a customer, active or not."""
        self._values[key] = self[key] + tokens / self._weight(key)

    def lowest(self) -> K | None:
        """The active customer with the lowest counter; of equal ones the one that is active longer."""
        heap = self._heap
        while heap:
            value, entry, key = heap[0]
            if self._entry.get(key) != entry:
                heapq.heappop(heap)
            elif value < self._values[key]:
                heapq.heapreplace(heap, (self._values[key], entry, key))
            else:
                return key
        return None

    def first(self, most: int, within: float = float("inf")) -> list[K]:
        """The active customers with the lowest counters, in order.

        Args:
            within: only those whose counter is at most so much above the lowest.
        """
        taken: list[tuple[float, int, K]] = []
        while len(taken) < most and (key := self.lowest()) is not None:
            if taken and self._values[key] > taken[0][0] + within:
                break
            taken.append(heapq.heappop(self._heap))
        for item in taken:
            heapq.heappush(self._heap, item)
        return [key for _, _, key in taken]

    def forget_idle(self, busy: Callable[[K], bool]) -> None:
        """Drop counters that tell nothing: those an activation would lift anyway.

        Args:
            busy: whether a customer still has something in flight that will be charged.
        """
        if len(self._values) <= self._most:
            return
        first = self.lowest()
        floor = self._left if first is None else self._values[first]
        self._values = {
            k: v for k, v in self._values.items() if k in self._entry or v > floor or busy(k)
        }
        self._most = 2 * len(self._values) + _SPARE
