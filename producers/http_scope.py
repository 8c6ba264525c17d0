"""The outermost layer of the gateway: ``x-request-id`` on every answer, and nothing unanswered."""

from __future__ import annotations

import logging
import uuid
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contracts.limits import RateLimits

from .http_errors import internal_error
from .limit_headers import limit_headers

log = logging.getLogger(__name__)

_REQUEST_ID: Final = "headrace.request_id"
_RATE_LIMITS: Final = "headrace.rate_limits"


def name_request(scope: Scope, request_id: str) -> None:
    """Let the answer to this HTTP request carry ``request_id`` as its ``x-request-id``."""
    scope[_REQUEST_ID] = request_id


def note_rate_limits(scope: Scope, rate_limits: RateLimits | None) -> None:
    """Let the answer to this HTTP request tell its caller's limits."""
    scope[_RATE_LIMITS] = rate_limits


class RequestScope:
    """ASGI middleware. A call that concerns no chat request gets an id of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                request_id = scope.get(_REQUEST_ID) or f"req_{uuid.uuid4().hex}"
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                rate_limits: RateLimits | None = scope.get(_RATE_LIMITS)
                if rate_limits is not None:
                    headers.update(limit_headers(rate_limits))
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            log.debug("client left while it sent its body")
        except Exception:
            log.exception("unhandled error", extra={"request_id": scope.get(_REQUEST_ID)})
            if started:
                raise
            await internal_error()(scope, receive, send_named)
