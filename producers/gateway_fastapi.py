"""The gateway's HTTP application: the OpenAI API over the pipeline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import version

from infra.live_settings import LiveSettings
from infra.stored_replies_redis import StoredReplies
from infra.stream_redis import RedisTokenStreams
from streaming_edge.hub import Hub
from streaming_edge.protocols import Door

from .api_document import DocumentedApi
from .batch.routes_batches import BatchDesk, make_batches_router
from .batch.routes_files import FileDesk, make_files_router
from .conversation_desk import ConversationDesk
from .http_errors import install_error_handlers
from .http_scope import RequestScope
from .intake import PipelineIntake
from .moderations import ModerationDesk
from .replies import Replies
from .reply_reading import ReplyReading
from .reply_responses import ReplyServices
from .responses.reading import ResponseReading
from .routes_chat import make_chat_router
from .routes_conversations import make_conversations_router
from .routes_health import make_health_router
from .routes_models import make_models_router
from .routes_moderations import make_moderations_router
from .routes_page import install_page
from .routes_responses import make_responses_router
from .routes_stored import make_stored_router
from .submitting import Submitting


def make_app(
    live: LiveSettings,
    *,
    door: Door,
    intake: PipelineIntake,
    streams: RedisTokenStreams,
    hub: Hub,
    replies: Replies,
    files: FileDesk,
    batches: BatchDesk,
    kept: StoredReplies,
    conversations: ConversationDesk,
    moderations: ModerationDesk,
    not_ready: Callable[[], Awaitable[str | None]],
) -> DocumentedApi:
    """Build the application over parts that are started and stopped elsewhere.

    Without FastAPI's own pages for documentation, which load scripts from elsewhere, and without CORS.
    """
    settings = live.current
    app = DocumentedApi(
        title="Headrace",
        version=version("headrace"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    install_error_handlers(app)
    app.add_middleware(RequestScope)
    services = ReplyServices(hub, streams, replies, settings.http.keepalive_seconds)
    app.include_router(make_health_router(not_ready))
    app.include_router(make_models_router(settings, door))
    reading = ReplyReading(live, intake, streams, services, kept)
    submitting = Submitting(live, intake, replies)
    app.include_router(make_chat_router(live, door, intake, streams, services, reading, submitting))
    app.include_router(make_stored_router(live, door, streams, reading, kept))
    responses = ResponseReading(streams, kept)
    app.include_router(
        make_responses_router(
            live, door, intake, streams, services, submitting, responses, kept, conversations
        )
    )
    app.include_router(make_conversations_router(live, door, conversations))
    app.include_router(make_moderations_router(live, door, moderations))
    app.include_router(make_files_router(door, files))
    app.include_router(make_batches_router(live, door, batches))
    install_page(app, settings)
    return app
