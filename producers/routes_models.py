"""``/v1/models``: every name the caller may use, aliases included."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from contracts.errors import ErrorCode
from infra.settings import Settings
from streaming_edge.protocols import Door

from .api_document import MODEL_ERRORS, describe
from .api_shapes import ModelList, ModelObject
from .chat_request import may_use, resolve_model
from .http_auth import authenticate
from .http_errors import JsonResponse


def make_models_router(settings: Settings, door: Door) -> APIRouter:
    """The routes under ``/v1/models``."""
    router = APIRouter(prefix="/v1/models", redirect_slashes=False)

    @router.get("", **describe("The models this key may use", tag="Models", success=ModelList))
    async def list_models(request: Request) -> Response:
        principal = authenticate(request, door)
        names = [
            model_object(alias, name)
            for name, model in settings.models.items()
            if may_use(model, principal)
            for alias in (name, *model.aliases)
        ]
        return JsonResponse({"object": "list", "data": names})

    @router.get(
        "/{name:path}",
        **describe(
            "One model", tag="Models", success=ModelObject, errors=(*MODEL_ERRORS, ErrorCode.NOT_FOUND)
        ),
    )
    async def retrieve_model(request: Request, name: str) -> Response:
        principal = authenticate(request, door)
        canonical, _ = resolve_model(name, settings, principal)
        return JsonResponse(model_object(name, canonical))

    return router


def model_object(name: str, canonical: str) -> dict[str, Any]:
    """A model in the API's shape; ``root`` is the model an alias stands for. The age is not known."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "headrace", "root": canonical}
