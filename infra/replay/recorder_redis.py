"""Recording token streams while they are written: the one way to know when each of their entries came.

Reads beside everybody else and counts as nobody's reader: a request that its readers have left still ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import redis.asyncio as redis

from contracts.entries import Accepted
from contracts.stream_ids import START
from streaming_edge.reader_redis import RawStreams, StreamTail

from ..open_requests_redis import OPEN_KEY
from ..stream_redis import request_id_of, stream_entry, stream_key
from .recordings import Recording, TimedEntry
from .turns import Wanted

#: How long a request that was accepted may wait until it is noticed.
_LOOK_MS: Final = 20
#: The index is read so far back, for clocks that differ.
_WINDOW_MS: Final = 10_000
_MOST_AT_ONCE: Final = 256
_MOST_REMEMBERED: Final = 100_000


@dataclass
class _Tape:
    """A stream that is being recorded."""

    began: float
    entries: list[TimedEntry] = field(default_factory=list)

    @property
    def position(self) -> bytes:
        """The last entry it has."""
        return str(self.entries[-1].item.id if self.entries else START).encode()


class Recorder:
    """Records the wanted requests that are accepted from now on, at most 256 at once.

    Args:
        reader_client: made with ``connect(..., blocking=True)``.
        begun: called once: what is accepted from then on is recorded.
        done: called with each recording when its request has ended.

    Attributes:
        missed: requests that came while as many as possible were recorded.
    """

    def __init__(
        self,
        client: redis.Redis,
        reader_client: redis.Redis,
        wanted: Wanted,
        begun: Callable[[], None],
        done: Callable[[Recording], None],
    ) -> None:
        self._redis: Any = client  # redis-py types replies for every protocol version at once
        self._tail = StreamTail(reader_client, _LOOK_MS)
        self._wanted = wanted
        self._begun = begun
        self._done = done
        self._tapes: dict[str, _Tape] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        self.missed = 0

    async def run(self) -> None:
        """Record until cancelled.

        Raises:
            redis.exceptions.RedisError: Redis cannot be reached; so do ``OSError`` and ``TimeoutError``.
        """
        try:
            await self._tail.connect()
            for raw in await self._redis.zrange(OPEN_KEY, 0, -1):
                self._remember(raw.decode())  # their first entries came unseen
            self._begun()
            while True:
                await self._notice()
                keys = [stream_key(request_id).encode() for request_id in self._tapes]
                positions = [tape.position for tape in self._tapes.values()]
                self._take(await self._tail.read(keys, positions, 0))
        finally:
            await self._tail.disconnect()

    def unfinished(self) -> list[Recording]:
        """What has not ended, as far as it has come."""
        return [_recording(request_id, tape) for request_id, tape in self._tapes.items() if tape.entries]

    async def _notice(self) -> None:
        since_ms = int(time.time() * 1000) - _WINDOW_MS
        for raw in await self._redis.zrangebyscore(OPEN_KEY, since_ms, "+inf"):
            request_id = raw.decode()
            if request_id in self._seen:
                continue
            self._remember(request_id)
            if len(self._tapes) < _MOST_AT_ONCE:
                self._tapes[request_id] = _Tape(_now())
            else:
                self.missed += 1

    def _remember(self, request_id: str) -> None:
        self._seen[request_id] = None
        if len(self._seen) > _MOST_REMEMBERED:
            self._seen.popitem(last=False)

    def _take(self, streams: RawStreams) -> None:
        now = _now()
        for key, items in streams:
            request_id = request_id_of(key)
            tape = self._tapes[request_id]
            at_ms = int((now - tape.began) * 1000)
            for entry_id, fields in items:
                pairs = iter(fields)
                item = stream_entry(entry_id, dict(zip(pairs, pairs, strict=True)))
                tape.entries.append(TimedEntry(at_ms, item))
            self._sort_out(request_id, tape)

    def _sort_out(self, request_id: str, tape: _Tape) -> None:
        """Drop what is not wanted; pass on what has ended."""
        first, last = tape.entries[0].item, tape.entries[-1].item
        wanted = isinstance(first.entry, Accepted) and self._wanted.takes_request(
            request_id, first.entry
        )
        if wanted and not last.id.is_seal:
            return
        del self._tapes[request_id]
        if wanted:
            self._done(_recording(request_id, tape))


def _recording(request_id: str, tape: _Tape) -> Recording:
    return Recording(request_id, "measured", tuple(tape.entries))


def _now() -> float:
    return asyncio.get_running_loop().time()
