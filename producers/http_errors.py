"""Every error of the gateway in the API's shape, whoever raised it."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from contracts.errors import ApiError, ErrorBody, ErrorCode
from contracts.token_stream import StreamsUnavailable
from infra.file_storage_fsspec import StorageUnavailable
from infra.telemetry import REFUSED_CALLS
from streaming_edge.json_text import json_text

from .intake import unavailable
from .limit_headers import limit_headers

log = logging.getLogger(__name__)

_BY_STATUS = {
    404: (ErrorCode.NOT_FOUND, "There is nothing at this address."),
    405: (ErrorCode.METHOD_NOT_ALLOWED, "This address does not answer that method."),
}


class JsonResponse(Response):
    """A JSON body that is one line by anyone's definition."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """See :class:`starlette.responses.Response`."""
        return json_text(content)


def error_response(
    body: ErrorBody,
    *,
    status: int | None = None,
    retry_after_seconds: int | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """An error object as an HTTP response; the status follows from its code unless given."""
    status = status or body.status
    extra = dict(headers or {})
    if retry_after_seconds is not None:
        extra["retry-after"] = str(retry_after_seconds)
    if status == 401:
        extra["www-authenticate"] = 'Bearer realm="headrace"'
    return JsonResponse({"error": body.model_dump()}, status_code=status, headers=extra)


def refusal_response(error: ApiError) -> Response:
    """An :class:`ApiError` as an HTTP response, counted."""
    REFUSED_CALLS.labels(error.code.value).inc()
    headers = limit_headers(error.rate_limits) if error.rate_limits is not None else None
    return error_response(error.body, retry_after_seconds=error.retry_after_seconds, headers=headers)


def internal_error() -> Response:
    """What a client sees of an error of ours: that it is one."""
    return refusal_response(ApiError(ErrorCode.INTERNAL, "The server failed to answer this request."))


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refusal_response(error)


async def _store_unavailable(_: Request, error: Exception) -> Response:
    log.warning("a store cannot be reached", extra={"error": str(error)[:200]})
    return refusal_response(unavailable())


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = _BY_STATUS.get(error.status_code)
    code, message = known or (ErrorCode.INVALID_REQUEST, "The request cannot be answered.")
    REFUSED_CALLS.labels(code.value).inc()
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(_methods(request)))
    return error_response(ApiError(code, message).body, status=error.status_code, headers=headers)


def _methods(request: Request) -> set[str]:
    """What the address answers. The framework names the methods of the first of its routes alone."""
    found = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in found for method in getattr(route, "methods", None) or ()}


async def _validation_error(_: Request, error: Exception) -> Response:
    return refusal_response(ApiError(ErrorCode.INVALID_REQUEST, "The request is not valid."))


def install_error_handlers(app: FastAPI) -> None:
    """Answer the framework's own errors and ours alike."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(StreamsUnavailable, _store_unavailable)
    app.add_exception_handler(StorageUnavailable, _store_unavailable)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _validation_error)
