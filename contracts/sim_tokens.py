"""The simulated model's tokenizer: text to token ids, as a pure function.

It stands here because two folders that must not know each other share it: the stage that tokenizes prompts
and the simulated engine whose script recognises them.
"""

from __future__ import annotations

import re
from zlib import crc32

_PIECE = re.compile(r"\s?\w+|\s|[^\w\s]")

#: Ids of prompt tokens start here; those below are the simulated engine's bytes and control tokens.
FIRST_PROMPT_ID = 1024
_PROMPT_IDS = 2**17


def sim_token_ids(text: str) -> list[int]:
    """One id per word (with the white space before it), white space or punctuation character.

    Equal pieces have equal ids; different ones may share an id, as the text is never rebuilt from them.
    """
    return [FIRST_PROMPT_ID + crc32(piece.encode()) % _PROMPT_IDS for piece in _PIECE.findall(text)]
