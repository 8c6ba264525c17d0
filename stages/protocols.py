"""The seams of the stages: making prompts, and choosing who is served next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from contracts.records import Message
from contracts.tiers import QueueClass
from contracts.worker_events import WorkerEvent
from infra.settings import SchedulerSettings


class PromptTokenizer(Protocol):
    """Turns messages into the token ids one model expects as its prompt.

    Pure: equal messages give equal ids in every process. Text inside a message never becomes a control
    token of the model, whatever it spells.
    """

    async def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the messages under the model's chat template, up to where the reply starts.

        Long prompts are encoded off the event loop.

        Raises:
            stages.errors.PromptRefused: the template does not take these messages.
        """


@dataclass(frozen=True, slots=True)
class Job:
    """What scheduling needs to know of a request.

    Attributes:
        request_id: idempotency key: a second job of the same id is the same job.
        choices: replies it generates at once (``n``), each taking a slot.
        prompt_tokens: length of its prompt.
        output_tokens: the most tokens it may generate, over all choices.
        prefix_hashes: chained hash of each full chunk of its prompt (see ``kv.layout``).
        conversation_id: requests of one tenant and conversation run one after another; None = by itself.
        continues: whether another worker can go on with its reply once text of it is out.
        queued_ms: when it was moderated, Unix milliseconds: its place in the line.
        deadline_ms: Unix milliseconds from which it is no longer started.
    """

    request_id: str
    queue_class: QueueClass
    pool: str
    tenant: str
    choices: int
    prompt_tokens: int
    queued_ms: int
    deadline_ms: int
    output_tokens: int = 0
    prefix_hashes: tuple[str, ...] = ()
    conversation_id: str | None = None
    continues: bool = True


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Give a request to a worker. The policy counts it as in flight from now on.

    Attributes:
        slot: partition of the pool's dispatch topic that the worker reads.
        attempt: number of this attempt; larger than every earlier one.
        held_tokens / tier_tokens: prompt tokens that the worker is thought to hold / to find in the KV tier.
    """

    request_id: str
    worker_id: str
    slot: int
    attempt: int
    held_tokens: int = 0
    tier_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Expire:
    """End a request as expired: nobody waits for it any more, and it never started."""

    request_id: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End a request as failed: it has lost too many workers, or waited too long for another one."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """Make room: the worker stops this request and hands it over, so that it waits again.

    Only for requests that continue (:attr:`Job.continues`): a worker does not stop others.

    The policy counts it as in flight until it is handed over (:meth:`SchedulingPolicy.orphaned`), has
    ended or has lost its lease. Repeating it is harmless, losing it costs the one that waits for room.

    Attributes:
        slot: partition of the pool's dispatch topic that the worker reads.
    """

    request_id: str
    worker_id: str
    slot: int


Effect = Dispatch | Expire | GiveUp | Preempt


class SchedulingPolicy(Protocol):
    """Who is served next, and where. Plain synchronous state: no clock, no I/O, no randomness.

    The shell (:mod:`stages.scheduler`) reports what happened and performs what :meth:`decide` returns.
    ``now_ms`` is Unix milliseconds and never goes backwards. Reports on unknown requests are ignored, so
    late and repeated ones are harmless. A request is known from :meth:`queued` to :meth:`ended`.
    """

    def queued(self, job: Job, now_ms: int) -> None:
        """A request joins its line; ignored if it is known."""

    def worker_seen(self, pool: str, event: WorkerEvent, now_ms: int) -> None:
        """A worker's event arrived: it is alive and has this capacity. What it finished is ended apart."""

    def adopted(self, request_id: str, worker_id: str, attempt: int, now_ms: int) -> None:
        """A request is found to run already (dispatched by an earlier scheduler): it is in flight."""

    def orphaned(self, request_id: str, last_attempt: int, now_ms: int) -> None:
        """A request is found started by an earlier scheduler's dispatch, its worker gone: in its line."""

    def undelivered(self, request_id: str, now_ms: int) -> None:
        """A dispatch was not published: the request is back at its place in the line."""

    def probed(self, request_id: str, lease_holder: str | None, last_attempt: int, now_ms: int) -> None:
        """What Redis says of a request in flight that is not sealed.

        Args:
            lease_holder: the worker whose lease is alive, or None.
            last_attempt: the highest attempt that has started; 0 = none.
        """

    def ended(self, request_id: str) -> None:
        """A request has reached its terminal state, or is no longer ours: forget it."""

    def decide(self, now_ms: int) -> list[Effect]:
        """What is to be done now; each effect is returned once. Cheap when nothing is."""

    def to_probe(self, now_ms: int) -> list[str]:
        """Requests in flight of which it is time to ask Redis whether they are alive."""

    def waiting(self) -> dict[QueueClass, int]:
        """Requests in each line."""

    def is_waiting(self, request_id: str) -> bool:
        """Whether a request stands in its line (not in flight, not ended, not unknown)."""

    def in_flight(self) -> int:
        """Requests given to workers and not ended."""

    def pause(self, classes: frozenset[QueueClass]) -> None:
        """Requests of these classes are not dispatched until another set is given; they still expire."""

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """These settings from now on. What is already given stays; the kind of policy does not change."""
