"""Request ids, and the checks on names that users choose.

Ids order by creation time, so that sorting them sorts requests; they carry enough randomness that nobody
guesses another's. Anything a user names is checked here before it becomes part of a key or a label.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

REQUEST_ID_PATTERN = r"chatcmpl-[0-9a-f]{32}"
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN, re.ASCII)
USER_NAME_PATTERN = r"[A-Za-z0-9_-]{1,64}"
_USER_NAME = re.compile(USER_NAME_PATTERN, re.ASCII)


def make_time_id(now_ms: int, random_bytes: bytes) -> str:
    """48 bits of time + 80 random bits, in hex: 32 characters that sort by time.

    Args:
        now_ms: Unix time in milliseconds.
        random_bytes: exactly 10 bytes from a secure source.
    """
    if len(random_bytes) != 10:
        raise ValueError("10 random bytes are needed")
    return f"{now_ms & (2**48 - 1):012x}{random_bytes.hex()}"


def make_request_id(now_ms: int, random_bytes: bytes) -> str:
    """``chatcmpl-`` and a :func:`make_time_id`."""
    return f"chatcmpl-{make_time_id(now_ms, random_bytes)}"


def time_part(made_id: str) -> str:
    """What ids with different prefixes sort by: their :func:`make_time_id`."""
    return made_id[-32:]


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
