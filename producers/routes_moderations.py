"""``/v1/moderations``: what moderation thinks of texts, without a model being asked."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from contracts.errors import ErrorCode
from infra.live_settings import LiveSettings
from streaming_edge.protocols import Door

from .api_document import describe
from .http_auth import authenticate
from .http_body import read_json
from .http_errors import JsonResponse
from .moderations import BODY_SCHEMA, MODEL, Moderation, ModerationDesk, parse_inputs


def make_moderations_router(live: LiveSettings, door: Door, desk: ModerationDesk) -> APIRouter:
    """The route ``/v1/moderations``."""
    router = APIRouter(prefix="/v1/moderations", redirect_slashes=False)

    @router.post(
        "",
        **describe(
            "What moderation thinks of texts",
            tag="Moderations",
            body=BODY_SCHEMA,
            success=Moderation,
            errors=(ErrorCode.MODEL_NOT_FOUND, ErrorCode.UNSUPPORTED, ErrorCode.MODERATION_UNAVAILABLE),
        ),
    )
    async def create(request: Request) -> Response:
        authenticate(request, door)
        texts = parse_inputs(await read_json(request, live.current.http.max_body_bytes))
        results = await desk.judge(texts)
        return JsonResponse({"id": f"modr-{uuid.uuid4().hex}", "model": MODEL, "results": results})

    return router
