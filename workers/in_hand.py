"""The requests a worker has taken and not ended: what its heartbeats say of them, and who is told to stop."""

from __future__ import annotations

from typing import Protocol

from contracts.records import DispatchRecord


class Taken(Protocol):
    """A request in this worker's hands.

    Attributes:
        record: as it was dispatched.
    """

    record: DispatchRecord

    @property
    def generated(self) -> int:
        """Output tokens so far, of earlier attempts too, over all choices."""

    @property
    def prefilled(self) -> bool:
        """Whether the engine has given a first token of it."""

    def preempt(self) -> None:
        """Stop as soon as that loses nothing, and hand it over. Idempotent; the request may end instead."""


class InHand:
    """All of them, by request id."""

    def __init__(self) -> None:
        self._requests: dict[str, Taken] = {}

    def add(self, request: Taken) -> None:
        """It has come."""
        self._requests[request.record.request_id] = request

    def remove(self, request: Taken) -> None:
        """It has ended here, however."""
        self._requests.pop(request.record.request_id, None)

    @property
    def choices(self) -> int:
        """Replies of all of them: the slots they take."""
        return sum(r.record.sampling.n for r in self._requests.values())

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of those without a first token."""
        return sum(len(r.record.prompt_token_ids) for r in self._requests.values() if not r.prefilled)

    def generated(self) -> dict[str, int]:
        """Output tokens of each so far."""
        return {request_id: r.generated for request_id, r in self._requests.items()}

    def generated_by(self, request_id: str) -> int:
        """Output tokens of one so far; 0 for one that is not in hand."""
        request = self._requests.get(request_id)
        return 0 if request is None else request.generated

    def preempt(self, request_id: str, attempt: int) -> None:
        """Stop a request, unless it is unknown or was dispatched again after ``attempt``."""
        request = self._requests.get(request_id)
        if request is not None and request.record.attempt <= attempt:
            request.preempt()
