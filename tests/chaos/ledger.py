"""What every client was told: the book that the stack's own state is compared with at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.stream_ids import StreamId

from .plan import Plan


@dataclass(frozen=True, slots=True)
class Seen:
    """A piece of text as a reader got it.

    Attributes:
        at: monotonic seconds of its arrival.
        connection: which connection of the reader brought it, from 0.
    """

    offset: StreamId
    index: int
    text: str
    at: float
    connection: int


@dataclass(frozen=True, slots=True)
class End:
    """How a reply ended, as a client was told.

    Attributes:
        completion_tokens: None where the way it was told has no room for usage.
    """

    status: str
    error: str | None = None
    completion_tokens: int | None = None


@dataclass
class Reading:
    """What one reader saw of one request, over all its connections.

    Attributes:
        label: which of a request's readers this is.
        left: it left for good before the end, as planned.
        connections: connections it took.
        reached: when each entry without text came first, monotonic seconds (websockets only).
        whole: texts of the choices, where the reply was not streamed and completed.
        problems: what no server may send, noticed as it came.
    """

    label: str
    seen: list[Seen] = field(default_factory=list)
    end: End | None = None
    left: bool = False
    connections: int = 0
    reached: dict[StreamId, float] = field(default_factory=dict)
    whole: list[str] | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def last(self) -> StreamId | None:
        """The offset to go on after."""
        return self.seen[-1].offset if self.seen else None

    def text(self, index: int) -> str:
        """All it saw of one choice."""
        return "".join(s.text for s in self.seen if s.index == index)


@dataclass
class Call:
    """One request, from the client's side.

    Attributes:
        request_id: None until the client was told.
        other_ids: further ids the client was told for the same idempotency key.
        refusal: error code of the refusal, where the service said no for good.
        cancelled: the client asked for its cancel.
        gave_up: why the client stopped waiting before the end; never planned.
    """

    plan: Plan
    request_id: str | None = None
    other_ids: list[str] = field(default_factory=list)
    refusal: str | None = None
    cancelled: bool = False
    readings: list[Reading] = field(default_factory=list)
    attempts: int = 0
    accepted_at: float = 0.0
    gave_up: str | None = None

    def accepted(self, request_id: str, now: float) -> None:
        """Note the id the client was told."""
        if self.request_id is None:
            self.request_id, self.accepted_at = request_id, now
        elif request_id != self.request_id and request_id not in self.other_ids:
            self.other_ids.append(request_id)

    def reading(self, label: str) -> Reading:
        """A new reader of this request."""
        self.readings.append(Reading(label))
        return self.readings[-1]
