"""From the tokens of one choice to text that is final: whole characters, no part of a stop string.

Pure. What comes out depends on the tokens only, not on how they are grouped into deltas, so a reply that
another worker continues reads like an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contracts.tiers import FinishReason

from .protocols import Detokenizer

Logprobs = Sequence[dict[str, Any]]


@dataclass(slots=True)
class Piece:
    """Text that is out: never empty, with the tokens it consists of.

    Attributes:
        logprobs: one object per token, or None where none were asked for.
    """

    text: str
    token_ids: list[int]
    logprobs: list[dict[str, Any]] | None


@dataclass(slots=True)
class _Held:
    """A token that is not out. ``text`` is what it completed; empty inside a character."""

    token_id: int
    text: str
    logprob: dict[str, Any] | None
    searched: bool


class Assembler:
    """The text of one choice.

    Tokens are held back whole while their text may belong to a stop string or to a character that is not
    complete. Which stop string ends a choice: the one that is complete first (of those, the longest), so
    the grouping of tokens does not matter. Stop strings are looked for in the text of the tokens after
    the first ``min_tokens`` only.

    Attributes:
        generated: output tokens of the choice so far: out, held, and end of sequence alike.
        finish_reason: why the choice ended; None while it runs.
    """

    __slots__ = (
        "_before",
        "_detokenizer",
        "_held",
        "_min_tokens",
        "_stops",
        "finish_reason",
        "generated",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        emitted_tokens: int = 0,
        emitted_text: str = "",
    ) -> None:
        """Start a choice, or go on with one.

        Args:
            detokenizer: primed with the prompt and the emitted tokens.
            emitted_tokens: output tokens that are out already.
            emitted_text: the text that is out, as far as stop strings are looked for in it. What let it
                out (a token after it that made it harmless) is not out, and may come out differently now.
        """
        self._detokenizer = detokenizer
        self._stops = tuple(s for s in stop if s)
        self._min_tokens = min_tokens
        # The only text that is out in which a stop string can still begin.
        reach = max((len(s) - 1 for s in self._stops), default=0)
        self._before = emitted_text[-reach:] if reach else ""
        self._held: list[_Held] = []
        self.generated = emitted_tokens
        self.finish_reason: FinishReason | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more can come out."""
        return self.finish_reason is not None

    def push(self, token_ids: Sequence[int], logprobs: Logprobs | None = None) -> Piece | None:
        """Take the next tokens; returns what is out because of them.

        After a stop string is complete, :attr:`finish_reason` is set and all further tokens are ignored
        and not counted.
        """
        piece: Piece | None = None
        for position, token_id in enumerate(token_ids):
            if self.finish_reason is not None:
                break
            text = self._detokenizer.push(token_id)
            self.generated += 1
            logprob = logprobs[position] if logprobs else None
            if text and not self._stops and not self._held:
                new: Piece | None = Piece(text, [token_id], None if logprob is None else [logprob])
            else:
                searched = self.generated > self._min_tokens
                self._held.append(_Held(token_id, text, logprob, searched))
                new = self._release() if text else None
            piece = _joined(piece, new)
        return piece

    def finish(self, reason: FinishReason) -> Piece | None:
        """The engine ended the choice: returns all that was held, less an incomplete last character.

        Does nothing when a stop string has ended the choice before.
        """
        if self.finish_reason is not None:
            return None
        tail = self._detokenizer.finish()
        if self._held and tail:
            self._held[-1].text += tail
        piece = self._release()
        if self.finish_reason is None:
            self.finish_reason = reason
            with_text = [i for i, held in enumerate(self._held, 1) if held.text]
            piece = _joined(piece, self._take(with_text[-1] if with_text else 0))
        return piece

    def _release(self) -> Piece | None:
        """What of the held tokens is final now; sets the finish reason when a stop string is complete."""
        first = next((i for i, h in enumerate(self._held) if h.searched), len(self._held))
        window = self._before + "".join([h.text for h in self._held[first:]])
        match = _first_match(window, self._stops)
        if match is not None:
            self.finish_reason = FinishReason.STOP
            return self._cut(first, match - len(self._before))
        safe = len(window) - _possible_start(window, self._stops) - len(self._before)
        count = length = 0
        for position, held in enumerate(self._held):
            if held.searched:
                length += len(held.text)
                if length > safe:
                    break
            # Tokens without text after the last one are inside a character (or silent): they wait.
            if held.text:
                count = position + 1
        return self._take(count)

    def _cut(self, first: int, match: int) -> Piece | None:
        """Everything before position ``match`` of the searched text; the rest is dropped."""
        count, left = first, match
        while left > 0:
            held = self._held[count]
            if len(held.text) > left:
                held.text = held.text[:left]
            left -= len(held.text)
            count += 1
        piece = self._take(count)
        self._held.clear()
        return piece

    def _take(self, count: int) -> Piece | None:
        taken, self._held = self._held[:count], self._held[count:]
        text = "".join([h.text for h in taken])
        if not text:
            return None
        self._before = ""
        logprobs = [h.logprob for h in taken if h.logprob is not None]
        return Piece(text, [h.token_id for h in taken], logprobs or None)


def _joined(first: Piece | None, second: Piece | None) -> Piece | None:
    if first is None or second is None:
        return first or second
    first.text += second.text
    first.token_ids += second.token_ids
    if second.logprobs is not None:
        first.logprobs = (first.logprobs or []) + second.logprobs
    return first


def _first_match(window: str, stops: tuple[str, ...]) -> int | None:
    """Where the stop string begins that is complete first; of several, the one that begins first."""
    found = [(at + len(s), at) for s in stops if (at := window.find(s)) >= 0]
    return min(found)[1] if found else None


def _possible_start(window: str, stops: tuple[str, ...]) -> int:
    """Characters at the end of ``window`` that may be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(window)), longest, -1):
            if window.endswith(stop[:size]):
                longest = size
                break
    return longest
