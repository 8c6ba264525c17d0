"""A waiting line: requests in order of their places."""

from __future__ import annotations

from bisect import bisect_left, insort

from .request import Place, Request


class Line:
    """Sorted by place. A window is some thousand requests, so that moving the rest up is quick."""

    def __init__(self) -> None:
        self._entries: list[tuple[Place, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request) -> None:
        """Put a request at its place; it must not be in the line."""
        insort(self._entries, (request.place, request))

    def remove(self, request: Request) -> None:
        """Take a request out; it must be in the line."""
        index = bisect_left(self._entries, (request.place, request))
        assert self._entries[index][1] is request
        del self._entries[index]

    def head(self) -> Request | None:
        """The oldest."""
        return self._entries[0][1] if self._entries else None

    def first(self, most: int) -> list[Request]:
        """The oldest few."""
        return [request for _, request in self._entries[:most]]
