"""The simulated model's text: which tokens it says, and what they look like.

Pure: a token follows from the prompt, the seed, the choice and its place in the reply, so two runs, or a
run continued elsewhere, can be compared byte for byte.

Output token ids::

    0 .. 255      single bytes (scripted replies)
    256           end of sequence, no text
    2**18 ..      words, the first of a reply capitalised and without the space before it
    2**19 ..      pieces of the script, in the order of the file
"""

from __future__ import annotations

import codecs
import hashlib
from array import array
from collections.abc import Callable, Sequence

EOS = 256
FIRST_WORD = 2**18
FIRST_PIECE = 2**19

_SYLLABLES = [c + v for c in "bdfghjklmnprstvz" for v in "aeiou"]
_WORDS = [a + b for a in _SYLLABLES for b in _SYLLABLES]
_COUNT = len(_WORDS)
_TEXT = [f" {w}" for w in _WORDS] + [w.capitalize() for w in _WORDS]
_MASK = 2**64 - 1


def reply_base(prompt_token_ids: Sequence[int], seed: int | None, choice: int) -> int:
    """What distinguishes one choice of one request from all others: 64 bits."""
    digest = hashlib.blake2b(array("Q", prompt_token_ids).tobytes(), digest_size=8)
    digest.update(f"{seed}/{choice}".encode())
    return int.from_bytes(digest.digest(), "big")


def word_id(base: int, position: int) -> int:
    """The token at ``position`` (0 = first) of the choice that ``base`` stands for."""
    x = (base + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK  # the mixing steps of SplitMix64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    word = (x >> 16) % _COUNT
    return FIRST_WORD + word + (_COUNT if position == 0 else 0)


def token_bytes(token_id: int, pieces: Sequence[bytes]) -> bytes:
    """The bytes of an output token; none for the end of sequence and unknown ids.

    Args:
        pieces: the script's piece table.
    """
    if token_id < EOS:
        return bytes([token_id])
    if FIRST_WORD <= token_id < FIRST_WORD + len(_TEXT):
        return _TEXT[token_id - FIRST_WORD].encode()
    if FIRST_PIECE <= token_id < FIRST_PIECE + len(pieces):
        return pieces[token_id - FIRST_PIECE]
    return b""


class SimDetokenizer:
    """UTF-8, token by token. Nothing needs priming: what is out ends with a whole character."""

    __slots__ = ("_decode", "_pending", "_pieces", "_state")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decode: Callable[[bytes], str] = decoder.decode
        self._state: Callable[[], tuple[bytes, int]] = decoder.getstate
        self._pieces = pieces
        self._pending: str | None = None

    def push(self, token_id: int) -> str:
        """See :class:`workers.protocols.Detokenizer`."""
        word = token_id - FIRST_WORD
        if self._pending is None and 0 <= word < len(_TEXT):
            return _TEXT[word]
        text = (self._pending or "") + self._decode(token_bytes(token_id, self._pieces))
        if self._state()[0]:
            self._pending = text
            return ""
        self._pending = None
        return text

    def finish(self) -> str:
        """See :class:`workers.protocols.Detokenizer`."""
        return self._pending or ""
