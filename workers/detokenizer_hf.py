"""Tokens to text with a Hugging Face tokenizer (the ``tokenizers`` library), a reply at a time.

``tokenizers.decoders.DecodeStream`` does nearly this; it raises on byte sequences that are no UTF-8, and
replays a prompt that ends inside a character, so the few lines it has are here, without both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
#: Tokens of context: enough for decoders that treat the start of a text in a way of its own.
_CONTEXT = 8
#: A character has at most four bytes, so by then no continuation can repair what is pending.
_LONGEST_CHARACTER = 4
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The printable characters that byte-level BPE writes for the 256 bytes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class HfVocabulary:
    """A model's tokenizer as the detokenizers of its replies share it."""

    def __init__(self, tokenizer: Tokenizer, silent: Collection[int] = ()) -> None:
        """Wrap a tokenizer.

        Args:
            silent: tokens without text besides the special ones (ends of sequence).
        """
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.silent = frozenset(silent) | {i for i, token in added.items() if token.special}
        self._byte_level = "ByteLevel" in str(tokenizer.decoder)
        self._alphabet = _byte_level_alphabet()
        self._literal = {i: token.content for i, token in added.items()}
        self.token_bytes = lru_cache(maxsize=65_536)(self._token_bytes)

    @classmethod
    def load(cls, folder: Path, silent: Collection[int] = ()) -> HfVocabulary:
        """The tokenizer of a Hugging Face model folder; raises OSError or ValueError where there is none."""
        return cls(Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8")), silent)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens that stand together; bytes that are no UTF-8 become U+FFFD."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, also where they are only part of a character."""
        if token_id in self._literal:
            return self._literal[token_id].encode()
        piece = self.tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        if self._byte_level and all(c in self._alphabet for c in piece):
            return bytes([self._alphabet[c] for c in piece])
        return str(piece).replace("\u2581", " ").encode()


class HfDetokenizer:
    """See :class:`workers.protocols.Detokenizer`.

    Decodes a short window of tokens: those whose text is out last, for context, and those that follow.
    """

    __slots__ = ("_out", "_start", "_vocabulary", "_window")

    def __init__(
        self, vocabulary: HfVocabulary, context: Sequence[int], *, all_out: bool = False
    ) -> None:
        """A detokenizer for what follows ``context`` (prompt and emitted tokens).

        Args:
            all_out: the text of the context is out, U+FFFD at its end included. Else a character that it
                leaves incomplete and the reply completes is the reply's.
        """
        self._vocabulary = vocabulary
        tail = context[-4 * _CONTEXT :]
        self._window = [t for t in tail if t not in vocabulary.silent][-_CONTEXT:]
        self._start = len(self._window)
        out = vocabulary.decode(self._window)
        self._out = out if all_out else out.rstrip(_REPLACEMENT)

    def push(self, token_id: int) -> str:
        """See :class:`workers.protocols.Detokenizer`."""
        if token_id in self._vocabulary.silent:
            return ""
        self._window.append(token_id)
        text = self._new_text()
        pending = len(self._window) - self._start
        if not text or (text.endswith(_REPLACEMENT) and pending < _LONGEST_CHARACTER):
            return ""
        self._window = self._window[self._start :]
        self._start = len(self._window)
        self._out = self._vocabulary.decode(self._window)
        return text

    def finish(self) -> str:
        """See :class:`workers.protocols.Detokenizer`."""
        return self._new_text().rstrip(_REPLACEMENT) if len(self._window) > self._start else ""

    def _new_text(self) -> str:
        text = self._vocabulary.decode(self._window)
        return text[len(self._out) :] if len(text) > len(self._out) else ""
