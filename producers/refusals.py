"""The ways a field of a body is refused. Messages never repeat the value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from contracts.errors import ApiError, ErrorCode


def invalid(param: str, message: str) -> ApiError:
    """The field is known and its value cannot be used."""
    return ApiError(ErrorCode.INVALID_VALUE, f"'{param}': {message}", param=param)


def unsupported(param: str, what: str) -> ApiError:
    """The field asks for something this system does not do."""
    return ApiError(ErrorCode.UNSUPPORTED, f"'{param}': {what} not supported here.", param=param)


#: Fields that ask for what the system does not do, and the values that ask for nothing.
Unsupported = Mapping[str, Collection[object]]


def refuse_unsupported(body: Mapping[str, Any], fields: Unsupported) -> None:
    """Raise :class:`ApiError` for the first of these fields that asks for something, as null does not."""
    for field, nothing in fields.items():
        value = body.get(field)
        if value is not None and value not in nothing:
            raise unsupported(field, "this parameter is")


def unsupported_schemas(fields: Unsupported) -> dict[str, dict[str, Any]]:
    """JSON schemas of these fields, for the OpenAPI document."""
    return {
        field: {"enum": [None, *nothing], "description": "Not supported."}
        for field, nothing in fields.items()
    }


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
