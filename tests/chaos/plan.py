"""What the clients of a run do, as a pure function of the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from infra.settings import hash_key

from .expected import Turn, full_text, prompt_ids

#: Stands in every prompt, and must never stand in a log.
MARKER = "zqxmarker"

#: (key, tenant, tier) of the clients.
KEYS = (
    ("sk-chaos-paid-1", "acme", "paid"),
    ("sk-chaos-paid-2", "globex", "paid"),
    ("sk-chaos-free-1", "hooli", "free"),
    ("sk-chaos-free-2", "initech", "free"),
    ("sk-chaos-batch", "umbrella", "batch"),
)


class Door(StrEnum):
    """How a client talks to the stack."""

    WS = "ws"
    SSE = "sse"
    HTTP = "http"


@dataclass(frozen=True)
class Plan:
    """One request and what its client does.

    Attributes:
        kind: name of the behaviour, for the report.
        door: how it is created.
        cuts: pieces of text after which the reader's n-th connection is dropped.
        doors: how the reader connects after the n-th drop (the last one again, after all of them).
        leave_after: pieces of text after which the reader leaves for good.
        cancel_after: pieces of text after which it is cancelled; 0 = as soon as it is accepted.
        cancel_door: how it is cancelled.
        late_reader: another reader reads it from its start: how, or None.
        conversation: name of its conversation, or None.
    """

    number: int
    kind: str
    at: float
    door: Door
    key: str
    prompt: str
    max_tokens: int
    n: int = 1
    stop: str | None = None
    seed: int | None = None
    cuts: tuple[int, ...] = ()
    doors: tuple[Door, ...] = ()
    leave_after: int | None = None
    cancel_after: int | None = None
    cancel_door: Door = Door.WS
    late_reader: Door | None = None
    conversation: str | None = None

    @property
    def idempotency_key(self) -> str:
        """Goes with every try to create it."""
        return f"chaos-{self.number}"

    def body(self, *, stream: bool) -> dict[str, Any]:
        """The chat completion body."""
        body: dict[str, Any] = {
            "model": "default",
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        optional = {"stop": self.stop, "seed": self.seed, "conversation_id": self.conversation}
        body |= {name: value for name, value in optional.items() if value is not None}
        return body | ({"n": self.n} if self.n > 1 else {})

    def door_of(self, connection: int) -> Door:
        """How the reader connects for its n-th connection after the first."""
        return self.doors[min(connection, len(self.doors)) - 1] if self.doors else self._reading_door()

    def _reading_door(self) -> Door:
        return self.door if self.door is not Door.HTTP else Door.SSE


@dataclass(frozen=True)
class Visit:
    """Requests of one client, one after the other."""

    at: float
    plans: list[Plan] = field(default_factory=list)


#: Behaviours and their shares.
_KINDS = {
    "ws": 10,
    "ws-drop": 18,
    "ws-leave": 6,
    "sse": 8,
    "sse-drop": 14,
    "ws-to-sse": 8,
    "sse-to-ws": 6,
    "http": 10,
    "cancel": 8,
    "cancel-queued": 5,
    "n2": 5,
    "stop": 8,
    "conversation": 6,
}


def visits(seed: int, requests: int, seconds: float) -> list[Visit]:
    """At least ``requests`` requests that begin within ``seconds``, in order of time."""
    rng = random.Random(seed)
    found: list[Visit] = []
    number = 0
    while number < requests:
        at = rng.uniform(0, seconds)
        kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
        key = rng.choice(KEYS)[0]
        count = rng.randint(2, 4) if kind == "conversation" else 1
        conversation = f"c{number}" if kind == "conversation" else None
        plans = [
            replace(_plan(rng, number + i, kind, at, key), conversation=conversation)
            for i in range(count)
        ]
        found.append(Visit(at, plans))
        number += count
    return sorted(found, key=lambda v: v.at)


def _plan(rng: random.Random, number: int, kind: str, at: float, key: str) -> Plan:
    words = " ".join(
        rng.choice(("river", "wheel", "stone", "gate", "flow")) for _ in range(rng.randint(3, 40))
    )
    prompt = f"{MARKER}{number} {words}"
    tokens = rng.choice((10, 30, 60, 120, 200, 300))
    seed = rng.choice((None, rng.randrange(1000)))
    plan = Plan(number, kind, at, Door.WS, key, prompt, tokens, seed=seed)
    cuts = tuple(rng.randint(0, max(1, tokens // 3)) for _ in range(rng.randint(1, 3)))
    if rng.random() < 0.15:
        plan = replace(plan, late_reader=rng.choice((Door.WS, Door.SSE, Door.HTTP)))
    match kind:
        case "ws":
            return plan
        case "ws-drop":
            return replace(plan, cuts=cuts, doors=(Door.WS,))
        case "ws-leave":
            return replace(plan, leave_after=rng.randint(0, tokens))
        case "sse":
            return replace(plan, door=Door.SSE)
        case "sse-drop":
            return replace(plan, door=Door.SSE, cuts=cuts, doors=(Door.SSE,))
        case "ws-to-sse":
            return replace(plan, cuts=cuts, doors=(Door.SSE, Door.WS))
        case "sse-to-ws":
            return replace(plan, door=Door.SSE, cuts=cuts, doors=(Door.WS, Door.SSE))
        case "http":
            return replace(plan, door=Door.HTTP)
        case "cancel":
            after = rng.randint(1, max(1, tokens // 2))
            doors = rng.choice((Door.WS, Door.SSE)), rng.choice((Door.WS, Door.HTTP))
            return replace(plan, door=doors[0], cancel_after=after, cancel_door=doors[1])
        case "cancel-queued":
            return replace(plan, cancel_after=0, cancel_door=rng.choice((Door.WS, Door.HTTP)))
        case "n2":
            return replace(plan, n=2, door=rng.choice((Door.WS, Door.SSE)), max_tokens=min(tokens, 120))
        case "stop":
            text = full_text(prompt_ids([Turn("user", prompt)]), seed, 0, tokens)
            begin = rng.randint(0, max(0, len(text) - 6))
            stop = text[begin : begin + rng.randint(2, 6)].strip() or text[:3]
            return replace(plan, stop=stop, door=rng.choice((Door.WS, Door.SSE)), cuts=cuts[:1])
        case _:
            return replace(plan, door=rng.choice(list(Door)), max_tokens=min(tokens, 120))


def settings_file(engine_settings: dict[str, Any], max_wait_seconds: float) -> dict[str, Any]:
    """The configuration of the stack that the clients of :func:`visits` can use."""
    raw = dict(engine_settings)
    raw["keys"] = [
        {"id": tenant, "sha256": hash_key(key), "tenant": tenant, "tier": tier}
        for key, tenant, tier in KEYS
    ]
    for tier in raw["tiers"].values():
        tier["max_wait_seconds"] = max_wait_seconds
    # A reply may lose its worker more often here than in the field; poison has a test of its own.
    raw["scheduler"]["max_attempts"] = 12
    return raw
