"""The chat page: static files of the edge, and where the page finds its websocket."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path
from typing import Final

from fastapi import FastAPI, Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from infra.settings import Settings

from .api_document import describe
from .http_errors import JsonResponse

WEBSOCKET_PATH: Final = "/v1/ws"
STATIC_DIR: Final = Path(str(resources.files("streaming_edge"))) / "static"
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9.-]{1,253}|\[?[0-9A-Fa-f:.]{2,45}\]?", re.ASCII)
_HEADERS: Final = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'self'; connect-src 'self' ws: wss:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class _PageFiles(StaticFiles):
    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_HEADERS)
        return response


def websocket_url(settings: Settings, request: Request) -> str:
    """Where the page connects to: what is configured, else the edge's port on the page's own host."""
    if settings.http.public_ws_url is not None:
        return settings.http.public_ws_url
    host = request.url.hostname or ""
    if not _HOST_NAME.fullmatch(host):
        host = settings.edge.host
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    scheme = "wss" if request.url.scheme == "https" else "ws"
    return f"{scheme}://{host}:{settings.edge.port}{WEBSOCKET_PATH}"


def page_model(settings: Settings) -> str:
    """The model the page asks for: the alias ``default`` where there is one, else the first."""
    if settings.resolve_model("default") is not None:
        return "default"
    return next(iter(settings.models), "")


def install_page(app: FastAPI, settings: Settings) -> None:
    """Serve the page at ``/``."""

    @app.get(
        "/",
        **describe(
            "The chat page",
            tag="Page",
            success={"type": "string"},
            media_type="text/html",
            secured=False,
        ),
    )
    async def page() -> Response:
        return FileResponse(STATIC_DIR / "index.html", headers=_HEADERS)

    @app.get("/chat/config.json", include_in_schema=False)
    async def config(request: Request) -> Response:
        facts = {"ws_url": websocket_url(settings, request), "model": page_model(settings)}
        return JsonResponse(facts, headers={"cache-control": "no-store"})

    app.mount("/static", _PageFiles(directory=STATIC_DIR))
