"""How the parts of this folder are put together, for the gateway and for the edge's process."""

from __future__ import annotations

import redis.asyncio as redis

from infra.conversation_objects_redis import ConversationObjects
from infra.conversations_redis import Conversations
from infra.kafka import Publisher
from infra.limits_redis import LimitCounters
from infra.settings import Settings
from infra.stored_replies_redis import StoredReplies
from infra.stream_redis import RedisTokenStreams, connect

from .conversation_context import ConversationContext
from .conversation_desk import ConversationDesk
from .degradation import Degradation
from .door import KeyDoor
from .idempotency import IdempotencyKeys
from .intake import PipelineIntake
from .limits import Limits
from .queue_depth import QueueDepth
from .request_times import unix_ms


class WiredIntake(PipelineIntake):
    """A :class:`PipelineIntake` with Redis connection pools of its own; :meth:`close` it."""

    def __init__(self, settings: Settings, streams: RedisTokenStreams, publisher: Publisher) -> None:
        self._client = connect(settings.redis)
        self._queue_depth = QueueDepth(self._client)
        self._degrading = Degradation(self._client, settings)
        self._counting = connect(settings.limits_redis)
        self._limits = Limits(
            LimitCounters(self._counting, settings.limits.timeout_seconds), streams, settings, unix_ms
        )
        conversations = Conversations(self._client, settings.history)
        super().__init__(
            settings,
            streams,
            publisher,
            ConversationContext(settings, streams, conversations),
            self._queue_depth,
            IdempotencyKeys(self._client, streams, unix_ms),
            self._degrading,
            self._limits,
            StoredReplies(self._client, settings.stored),
        )

    def reconfigure(self, settings: Settings) -> None:
        """See :meth:`PipelineIntake.reconfigure`."""
        super().reconfigure(settings)
        self._degrading.reconfigure(settings)
        self._limits.reconfigure(settings)

    async def close(self) -> None:
        """Finish what has begun (before the publisher and the streams are closed), then disconnect."""
        await self.settle()
        await self._queue_depth.close()
        await self._degrading.close()
        await self._counting.aclose()
        await self._client.aclose()


def make_door(settings: Settings) -> KeyDoor:
    """The door for the keys of the configuration."""
    return KeyDoor(settings)


def make_conversation_desk(
    settings: Settings, client: redis.Redis, streams: RedisTokenStreams
) -> ConversationDesk:
    """The Conversations API over a connected Redis."""
    conversations = Conversations(client, settings.history)
    context = ConversationContext(settings, streams, conversations)
    return ConversationDesk(ConversationObjects(client, settings.history), conversations, context)


async def make_intake(
    settings: Settings, streams: RedisTokenStreams, publisher: Publisher
) -> WiredIntake:
    """The intake over connected token streams and a started publisher.

    The caller keeps ``streams`` and ``publisher`` and calls :meth:`WiredIntake.close` before it closes
    them. Connects on first use.
    """
    return WiredIntake(settings, streams, publisher)
