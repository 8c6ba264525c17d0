"""Who calls, from the ``Authorization`` header."""

from __future__ import annotations

from starlette.requests import Request

from contracts.errors import ApiError, ErrorCode
from contracts.identity import Principal
from streaming_edge.protocols import Door


def authenticate(request: Request, door: Door) -> Principal:
    """The principal of ``Authorization: Bearer <key>``.

    Raises:
        ApiError: ``invalid_api_key``.
    """
    scheme, _, api_key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not api_key.strip():
        message = "No API key: send it as 'Authorization: Bearer <key>'."
        raise ApiError(ErrorCode.INVALID_API_KEY, message)
    return door.authenticate(api_key.strip())
