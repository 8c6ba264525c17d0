"""The ways a field of a body is refused. Messages never repeat the value."""

from __future__ import annotations

from pydantic import ValidationError

from contracts.errors import ApiError, ErrorCode


def invalid(param: str, message: str) -> ApiError:
    """The field is known and its value cannot be used."""
    return ApiError(ErrorCode.INVALID_VALUE, f"'{param}': {message}", param=param)


def unsupported(param: str, what: str) -> ApiError:
    """The field asks for something this system does not do."""
    return ApiError(ErrorCode.UNSUPPORTED, f"'{param}': {what} not supported here.", param=param)


def refused_field(error: ValidationError) -> ApiError:
    """The first failure of a validation, in the API's words.

    Its ``loc`` must hold our field names and list indices only.
    """
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ""
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] != "value_error":
        message = f"{message[:1].lower()}{message[1:]}."
    return invalid(param, message)
