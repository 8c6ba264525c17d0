"""Whether requests can be put into the pipeline, and whether it can answer: for ``/readyz``."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import redis.asyncio as redis
from redis.exceptions import RedisError

from contracts.token_stream import StreamsUnavailable

from .kafka import Publisher, PublishError
from .settings import Settings
from .stack.policy import pipeline_gap
from .stack.state import STACK_FILE_VARIABLE, read_state
from .stream_redis import RedisTokenStreams
from .worker_feed_redis import WorkerFeed

#: The scheduler refreshes this hash and lets it expire soon after it stops.
DEPTH_KEY = "hr:queue:depth"

_RECENT_EVENTS = 32


async def services_not_ready(streams: RedisTokenStreams, publisher: Publisher) -> str | None:
    """Why a role that puts requests in cannot: what it is connected to does not answer; or None."""
    try:
        await streams.ping()
    except StreamsUnavailable:
        return "Redis does not answer"
    try:
        await publisher.ping()
    except PublishError:
        return "Kafka does not answer"
    return None


async def pipeline_not_ready(client: redis.Redis, settings: Settings) -> str | None:
    """Why a request accepted now might not be answered soon, or None.

    Looks at what the other roles leave in Redis: the scheduler's queue depth, and in each pool a worker's
    heartbeat that is younger than ``scheduler.worker_timeout_ms``. Under ``headrace up`` it also asks the
    supervisor's own view, which knows moderation and the edge too.

    Args:
        client: bounded by its own timeouts; Redis errors are an answer ("Redis: …"), not raised.
    """
    stack_file = os.environ.get(STACK_FILE_VARIABLE)
    if stack_file:
        state = await asyncio.to_thread(read_state, Path(stack_file))
        gap = pipeline_gap([p.health for p in state.roles]) if state else "the stack is starting"
        if gap is not None:
            return gap
    commands: Any = client  # redis-py types replies for every protocol version at once
    try:
        if not await commands.exists(DEPTH_KEY):
            return "no scheduler is running"
        seconds, _ = await commands.time()
        oldest_ms = seconds * 1000 - settings.scheduler.worker_timeout_ms
        for pool in settings.pools:
            position, events = await WorkerFeed(client, pool).recent(_RECENT_EVENTS)
            heard_ms = int(position.partition("-")[0])  # by Redis's own clock, like TIME
            if heard_ms < oldest_ms or not any(event.accepting for event in events):
                return f"no worker of pool {pool} takes work"
    except (RedisError, OSError, TimeoutError) as error:
        return f"Redis: {type(error).__name__}"
    return None
