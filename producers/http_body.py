"""Reading a JSON body: bounded in bytes and time, refused in the API's shape."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import orjson
from starlette.requests import Request

from contracts.errors import ApiError, ErrorCode

_BODY_SECONDS: Final = 30.0


async def read_json(request: Request, max_bytes: int) -> Any:
    """The decoded JSON body of a request.

    NaN, infinities, lone surrogates, bytes that are not UTF-8 and nesting over 1,024 levels are no JSON.

    Raises:
        ApiError: 400, 413 or 415.
        starlette.requests.ClientDisconnect: the client left.
    """
    _check_headers(request, max_bytes)
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(ErrorCode.INVALID_REQUEST, "The body did not arrive in time.") from None
    if not body:
        raise ApiError(ErrorCode.INVALID_JSON, "The body is empty; it must be a JSON object.")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        raise ApiError(ErrorCode.INVALID_JSON, "The body is not valid JSON in UTF-8.") from None


def _check_headers(request: Request, max_bytes: int) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    if media_type and not is_json:
        raise ApiError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, "The Content-Type must be application/json.")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, "Compressed bodies are not supported.")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(ErrorCode.REQUEST_TOO_LARGE, f"The body is larger than {max_bytes} bytes.")
