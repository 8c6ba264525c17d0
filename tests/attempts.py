"""What a worker does to a stream when it takes a request."""

from __future__ import annotations

from contracts.entries import Started
from contracts.stream_ids import StreamId
from contracts.token_stream import Appended
from infra.stream_redis import RedisTokenStreams


async def start_attempt(
    streams: RedisTokenStreams, request_id: str, attempt: int, worker_id: str = "w", revision: str = "1"
) -> Appended:
    """Write ``<a>-0``, and take the lease."""
    start = Started(worker_id=worker_id, model_revision=revision)
    (result,) = await streams.append([(request_id, StreamId(attempt, 0), start)])
    await streams.renew_leases([request_id], worker_id)
    return result
