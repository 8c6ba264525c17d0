"""The two ways a field of a chat completion body is refused. Messages never repeat the value."""

from __future__ import annotations

from contracts.errors import ApiError, ErrorCode


def invalid(param: str, message: str) -> ApiError:
    """The field is known and its value cannot be used."""
    return ApiError(ErrorCode.INVALID_VALUE, f"'{param}': {message}", param=param)


def unsupported(param: str, what: str) -> ApiError:
    """The field asks for something this system does not do."""
    return ApiError(ErrorCode.UNSUPPORTED, f"'{param}': {what} not supported here.", param=param)
