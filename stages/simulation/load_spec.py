"""What a load is made of, and the two ways to write it down: a TOML file, or a preset with changes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from contracts.tiers import QueueClass

from .presets import PRESETS
from .worker_model import WorkerModel

_M = TypeVar("_M", bound=BaseModel)


class LoadError(Exception):
    """A load or a trace cannot be used; the message names the key or the line and is meant for people."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Lengths(_Part):
    """Lognormal lengths, tokens.

    Attributes:
        median: half are shorter.
        sigma: spread, the standard deviation of the logarithm; 0 = all equal.
        most: longer ones are cut to this.
    """

    median: int = Field(ge=1)
    sigma: float = Field(default=0.0, ge=0, le=4)
    most: int = Field(default=1_000_000, ge=1)


class TierLoad(_Part):
    """The requests of one tier.

    Attributes:
        queue_class: the line they wait in.
        share: part of all conversations, relative to the other tiers.
        tenants: how many there are.
        zipf: how unequal their demand is: the k-th has weight k^-zipf; 0 = equal.
        flood_share: part of the tier's load that its first tenant sends, besides ``zipf``; 0 = none floods.
        prompt / reply: lengths of a user's message and of the reply.
        long_share / long_prompt: part of the messages that are long, and how long.
        max_tokens: reply length that is asked for at most; None = ``reply.most``.
        max_wait_seconds: not started after so long: expired.
        target_ms: time to first token of a good reply.
    """

    queue_class: QueueClass
    share: float = Field(gt=0)
    tenants: int = Field(default=1, ge=1, le=100_000)
    zipf: float = Field(default=0.0, ge=0, le=5)
    flood_share: float = Field(default=0.0, ge=0, lt=1)
    prompt: Lengths
    reply: Lengths
    long_share: float = Field(default=0.0, ge=0, le=1)
    long_prompt: Lengths = Lengths(median=8_000)
    max_tokens: int | None = Field(default=None, ge=1)
    max_wait_seconds: float = Field(default=120.0, gt=0)
    target_ms: float = Field(default=2_000.0, gt=0)


class ConversationLoad(_Part):
    """How requests hang together.

    Attributes:
        turns: mean number of turns (geometric); 1 = no conversations.
        think_seconds: mean time from the end of a reply to the next turn (exponential); the reply's end is
            estimated, as if its batch were full, so that arrivals are the same under every policy.
        system_tokens: prompt that all conversations of a tenant begin with.
        kept_reply: part of each reply that the next prompt repeats; less than 1 where reasoning is left out,
            and then nothing of the reply is found in a prefix cache.
        context_tokens: a conversation ends before its prompt would be longer than this.
    """

    turns: float = Field(default=1.0, ge=1, le=100)
    think_seconds: float = Field(default=60.0, ge=0)
    system_tokens: int = Field(default=0, ge=0)
    kept_reply: float = Field(default=1.0, ge=0, le=1)
    context_tokens: int = Field(default=16_384, ge=1)


class WorkerLoad(WorkerModel):
    """The workers: how many, what each is like, and the KV tier that they share.

    Attributes:
        tier_tokens: room of the tier, tokens; 0 = there is none.
        tier_load_ms: what a worker takes to load one token from it, beside its steps, one request after the
            other. Not faster than ``prefill_ms`` = nothing is loaded.
    """

    count: int = Field(default=8, ge=1, le=100_000)
    tier_tokens: int = Field(default=0, ge=0)
    tier_load_ms: float = Field(default=0.03, gt=0)

    @property
    def has_tier(self) -> bool:
        """Whether there is a tier that is worth loading from."""
        return self.tier_tokens > 0 and self.tier_load_ms < self.prefill_ms


class LoadSpec(_Part):
    """A whole experiment but for the policy.

    Attributes:
        seconds: time in which requests arrive.
        drain_seconds: time after that for what still waits; then the simulation is stopped.
        load: work offered over what the workers can do when full, on average; None = ``per_second`` is given.
        per_second: requests per second on average; None = ``load`` is given.
        day: swing of the rate over a day of 24 h, which starts at its quietest: 0 = constant, 1 = to nothing.
        starving_seconds: see :class:`~.fairness.Passing`.
    """

    seconds: float = Field(gt=0)
    drain_seconds: float = Field(default=600.0, ge=0)
    load: float | None = Field(default=None, gt=0)
    per_second: float | None = Field(default=None, gt=0)
    day: float = Field(default=0.0, ge=0, le=1)
    starving_seconds: float = Field(default=30.0, gt=0)
    tiers: dict[str, TierLoad] = Field(min_length=1)
    conversations: ConversationLoad = ConversationLoad()
    workers: WorkerLoad = WorkerLoad()

    @model_validator(mode="after")
    def _consistent(self) -> LoadSpec:
        if (self.load is None) == (self.per_second is None):
            raise ValueError("give either load or per_second")
        for name, tier in self.tiers.items():
            message = max(tier.prompt.most, tier.long_prompt.most if tier.long_share else 0)
            talk = self.conversations
            longest = max(talk.context_tokens, talk.system_tokens + message) + tier.reply.most
            if longest > self.workers.kv_tokens:
                raise ValueError(
                    f"tiers.{name}: prompt and reply can have {longest} tokens, "
                    f"more than workers.kv_tokens = {self.workers.kv_tokens}"
                )
        return self


def parse_load(text: str) -> LoadSpec:
    """Read a preset with changes: ``overload``, ``day,seconds=3600,workers.count=100``.

    Raises:
        LoadError: names the key at fault.
    """
    name, *changes = text.split(",")
    if name.strip() not in PRESETS:
        known = ", ".join(PRESETS)
        raise LoadError(f"load: {name.strip() or 'nothing'} is neither a file nor a preset ({known})")
    return spec_of(name.strip(), [change for change in changes if change.strip()])


def parse_toml(text: str) -> LoadSpec:
    """Read a TOML file; with ``preset = "NAME"`` it says only what differs from that preset.

    Raises:
        LoadError: names the key at fault.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LoadError(f"load: {error}") from None
    preset = raw.pop("preset", None)
    if preset is not None:
        if preset not in PRESETS:
            raise LoadError(f"load: preset: {preset} is none of {', '.join(PRESETS)}")
        raw = _merged(PRESETS[preset], raw)
    return _validated(LoadSpec, raw, "load")


def spec_of(preset: str, changes: Iterable[str]) -> LoadSpec:
    """A preset with ``key=value`` changes; a key is dotted, a value is written as in TOML or is a bare word.

    Raises:
        LoadError: names the key at fault.
    """
    return _validated(LoadSpec, _changed(PRESETS[preset], changes), "load")


def changed_workers(workers: WorkerLoad, changes: Iterable[str]) -> WorkerLoad:
    """Workers with ``key=value`` changes.

    Raises:
        LoadError: names the key at fault.
    """
    return _validated(WorkerLoad, _changed(workers.model_dump(), changes), "workers")


def _changed(raw: Mapping[str, Any], changes: Iterable[str]) -> Mapping[str, Any]:
    for change in changes:
        key, equals, value = (part.strip() for part in change.partition("="))
        if not (key and equals and value):
            raise LoadError(f"load: {change.strip()}: write key=value")
        try:
            parsed: Any = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        for part in reversed(key.split(".")):
            parsed = {part: parsed}
        raw = _merged(raw, parsed)
    return raw


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    # The rate is given in one of two ways: the one that is asked for replaces that of the preset.
    for key, other in (("load", "per_second"), ("per_second", "load")):
        if key in changes and other not in changes:
            merged.pop(other, None)
    return merged


def _validated(kind: type[_M], raw: Mapping[str, Any], what: str) -> _M:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise LoadError(f"{what}: {first_fault(error)}") from None


def first_fault(error: ValidationError) -> str:
    """The first key at fault, and what is wrong with it."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    what = "is not a known key" if first["type"] == "extra_forbidden" else first["msg"]
    return f"{where + ': ' if where else ''}{what}"
