"""The gateway's chat routes, its models and the chat page over recordings: what a front end calls by HTTP."""

from __future__ import annotations

from fastapi import FastAPI

from contracts.stored_reply import StoredReply
from producers.http_errors import install_error_handlers
from producers.http_scope import RequestScope
from producers.replies import Replies
from producers.reply_reading import ReplyReading
from producers.reply_responses import ReplyServices
from producers.routes_chat import make_chat_router
from producers.routes_health import make_health_router
from producers.routes_models import make_models_router
from producers.routes_page import install_page
from producers.submitting import Submitting
from streaming_edge.protocols import Door

from ..live_settings import LiveSettings
from ..settings import Settings
from .player import Player


class _NothingKept:
    """Implements :class:`producers.protocols.KeptReplies`."""

    async def get(self, tenant: str, request_id: str) -> StoredReply | None:
        return None


async def _ready() -> str | None:
    return None


def make_play_app(settings: Settings, door: Door, player: Player, replies: Replies) -> FastAPI:
    """Build the application; ``replies`` are those it has open."""
    live = LiveSettings(settings)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    install_error_handlers(app)
    app.add_middleware(RequestScope)
    services = ReplyServices(player, player, replies, settings.http.keepalive_seconds)
    reading = ReplyReading(live, player, player, services, _NothingKept())
    submitting = Submitting(live, player, replies)
    app.include_router(make_health_router(_ready))
    app.include_router(make_models_router(settings, door))
    app.include_router(make_chat_router(live, door, player, player, services, reading, submitting))
    install_page(app, settings)
    return app
