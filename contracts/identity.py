"""Request ids, and the checks on names that users choose.

Ids order by creation time, so that sorting them sorts requests; they carry enough randomness that nobody
guesses another's. Anything a user names is checked here before it becomes part of a key or a label.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_REQUEST_ID = re.compile(r"chatcmpl-[0-9a-f]{32}", re.ASCII)
_USER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


def make_request_id(now_ms: int, random_bytes: bytes) -> str:
    """``chatcmpl-`` + 48 bits of time + 80 random bits, in hex.

    Args:
        now_ms: Unix time in milliseconds.
        random_bytes: exactly 10 bytes from a secure source.
    """
    if len(random_bytes) != 10:
        raise ValueError("10 random bytes are needed")
    return f"chatcmpl-{now_ms & (2**48 - 1):012x}{random_bytes.hex()}"


def is_request_id(text: object) -> bool:
    """Whether ``text`` has the form of a request id (anything else is never looked up)."""
    return isinstance(text, str) and _REQUEST_ID.fullmatch(text) is not None


def is_user_name(text: object) -> bool:
    """Whether ``text`` may name a conversation: 1 to 64 of ``A-Z a-z 0-9 _ -``."""
    return isinstance(text, str) and _USER_NAME.fullmatch(text) is not None


def conversation_key(tenant: str, conversation_id: str) -> str:
    """Digest that names a tenant's conversation; no two (tenant, conversation) pairs share one.

    Lengths go into the digest, so that no way of splitting the parts collides.
    """
    raw = f"{len(tenant)}:{tenant}{len(conversation_id)}:{conversation_id}"
    return hashlib.sha256(raw.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Principal:
    """Who calls: what an API key stands for.

    Attributes:
        key_id: public id of the key.
        tenant: whose requests and conversations these are.
        tier: tier of the configuration.
    """

    key_id: str
    tenant: str
    tier: str
