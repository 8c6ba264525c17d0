"""Names of responses: the id of the request that makes one, with another prefix. Pure."""

from __future__ import annotations

import re
from typing import Final

from contracts.identity import time_part

RESPONSE_ID_PATTERN: Final = r"resp_[0-9a-f]{32}"
_RESPONSE_ID: Final = re.compile(RESPONSE_ID_PATTERN, re.ASCII)


def is_response_id(text: object) -> bool:
    """Whether ``text`` has the form of a response id (anything else is never looked up)."""
    return isinstance(text, str) and _RESPONSE_ID.fullmatch(text) is not None


def response_id_of(request_id: str) -> str:
    """The response that a request makes."""
    return f"resp_{time_part(request_id)}"


def request_id_of(response_id: str) -> str:
    """The request that makes a response whose id was checked."""
    return f"chatcmpl-{time_part(response_id)}"
