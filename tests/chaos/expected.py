"""What the simulated engine must have said: its pure text function, applied to what the clients asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contracts.sim_tokens import sim_token_ids
from workers.sim_text import reply_base, token_bytes, word_id


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of a prompt."""

    role: str
    content: str


def prompt_ids(messages: Sequence[Turn]) -> list[int]:
    """The prompt's tokens, as docs/SIM_ENGINE.md describes them."""
    return sim_token_ids("\n".join([*(f"{m.role}: {m.content}" for m in messages), "assistant:"]))


def token_ids(prompt: Sequence[int], seed: int | None, choice: int, count: int) -> list[int]:
    """The first ``count`` output tokens of a choice."""
    base = reply_base(prompt, seed, choice)
    return [word_id(base, position) for position in range(count)]


def full_text(prompt: Sequence[int], seed: int | None, choice: int, count: int) -> str:
    """The text of the first ``count`` tokens of a choice, without stop strings."""
    return b"".join(token_bytes(t, ()) for t in token_ids(prompt, seed, choice, count)).decode()


@dataclass(frozen=True, slots=True)
class Expected:
    """A completed choice: its text, and the tokens that were generated for it."""

    text: str
    tokens: int


def completed(
    prompt: Sequence[int], seed: int | None, choice: int, count: int, stop: str | None
) -> Expected:
    """What a choice says that is not interrupted by anything."""
    text = full_text(prompt, seed, choice, count)
    if stop is None or (at := text.find(stop)) < 0:
        return Expected(text, count)
    length = tokens = 0
    for token in token_ids(prompt, seed, choice, count):
        if length >= at + len(stop):
            break
        length += len(token_bytes(token, ()))
        tokens += 1
    return Expected(text[:at], tokens)
