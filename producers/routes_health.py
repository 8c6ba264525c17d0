"""``/healthz`` (the process answers) and ``/readyz`` (it can take requests right now)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from .api_document import describe
from .api_shapes import Alive, Readiness
from .http_errors import JsonResponse

_ANSWER_SECONDS: Final = 1.0


def make_health_router(not_ready: Callable[[], Awaitable[str | None]]) -> APIRouter:
    """The routes for load balancers; ``not_ready`` says why requests cannot be taken, or None."""
    router = APIRouter(redirect_slashes=False)

    @router.get("/healthz", **describe("The process lives", tag="Health", success=Alive, secured=False))
    async def healthz() -> Response:
        return JsonResponse({"status": "ok"})

    @router.get(
        "/readyz",
        **describe(
            "Requests can be taken now",
            tag="Health",
            success=Readiness,
            others={503: Readiness},
            secured=False,
        ),
    )
    async def readyz() -> Response:
        try:
            reason = await asyncio.wait_for(not_ready(), _ANSWER_SECONDS)
        except TimeoutError:
            reason = "no answer within a second"
        return JsonResponse(
            {"ready": reason is None, "reason": reason}, status_code=200 if reason is None else 503
        )

    return router
