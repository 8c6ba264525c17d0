"""Boolean query parameters."""

from __future__ import annotations

from typing import Final

from fastapi import Request

from contracts.errors import ApiError, ErrorCode

_TRUE: Final = ("true", "1")
_FALSE: Final = ("false", "0", "")


def query_flag(request: Request, name: str) -> bool:
    """Whether a query parameter is set; an absent one is not.

    Raises:
        ApiError: 400.
    """
    value = request.query_params.get(name, "").lower()
    if value not in (*_TRUE, *_FALSE):
        raise ApiError(ErrorCode.INVALID_VALUE, f"'{name}' must be true or false.", param=name)
    return value in _TRUE
