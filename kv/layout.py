"""How prompts are cut and named for the KV cache: chunks of tokens and their chained hashes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

#: Tokens of one chunk: 16 vLLM blocks of 16 tokens.
CHUNK_TOKENS = 256


def prefix_hashes(token_ids: Sequence[int], salt: str, chunk_tokens: int = CHUNK_TOKENS) -> list[str]:
    """Chained hash of each full chunk: equal hash means equal tokens from the start of the prompt.

    Args:
        token_ids: a prompt; a last chunk that is not full has no hash.
        salt: what keeps tenants apart; derived by the server, never taken from a request.
        chunk_tokens: tokens per chunk.

    Returns:
        One 32-digit hex string per full chunk, in order.
    """
    hashes: list[str] = []
    parent = hashlib.blake2b(salt.encode(), digest_size=16).digest()
    for end in range(chunk_tokens, len(token_ids) + 1, chunk_tokens):
        chunk = array("I", token_ids[end - chunk_tokens : end]).tobytes()
        parent = hashlib.blake2b(parent + chunk, digest_size=16).digest()
        hashes.append(parent.hex())
    return hashes
