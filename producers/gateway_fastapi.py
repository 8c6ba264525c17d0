"""The gateway's HTTP application: the OpenAI API over the pipeline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI

from infra.live_settings import LiveSettings
from infra.stream_redis import RedisTokenStreams
from streaming_edge.hub import Hub
from streaming_edge.protocols import Door

from .http_errors import install_error_handlers
from .http_scope import RequestScope
from .intake import PipelineIntake
from .replies import Replies
from .reply_responses import ReplyServices
from .routes_chat import make_chat_router
from .routes_health import make_health_router
from .routes_models import make_models_router
from .routes_page import install_page


def make_app(
    live: LiveSettings,
    *,
    door: Door,
    intake: PipelineIntake,
    streams: RedisTokenStreams,
    hub: Hub,
    replies: Replies,
    not_ready: Callable[[], Awaitable[str | None]],
) -> FastAPI:
    """Build the application over parts that are started and stopped elsewhere.

    Without FastAPI's own pages for documentation, which load scripts from elsewhere, and without CORS.
    """
    settings = live.current
    app = FastAPI(title="Headrace", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    install_error_handlers(app)
    app.add_middleware(RequestScope)
    services = ReplyServices(hub, streams, replies, settings.http.keepalive_seconds)
    app.include_router(make_health_router(not_ready))
    app.include_router(make_models_router(settings, door))
    app.include_router(make_chat_router(live, door, intake, streams, services))
    install_page(app, settings)
    return app
