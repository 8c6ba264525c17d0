"""What Redis trouble means to a caller: the store is unavailable or full, try again later."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.exceptions import OutOfMemoryError, RedisError

from contracts.token_stream import StreamsFull, StreamsUnavailable


def unavailable(error: Exception) -> StreamsUnavailable:
    """What a failed Redis call means."""
    kind = StreamsFull if isinstance(error, OutOfMemoryError) else StreamsUnavailable
    return kind(str(error) or type(error).__name__)


@asynccontextmanager
async def reachable() -> AsyncIterator[None]:
    """Turn every failure of a Redis call into :class:`contracts.token_stream.StreamsUnavailable`.

    Refusals count too: a replica that is not promoted yet (``READONLY``), a full memory (``OOM``) and a
    server that is still loading pass, as a lost connection does.
    """
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise unavailable(error) from error
