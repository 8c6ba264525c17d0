"""Recordings behind the seams of edge and gateway: what is played looks like a request that runs.

Every request that is accepted plays the next recording, in the order of the file and from its beginning
again after the last, under an id of its own. A recording can also be read under the id it was recorded with:
it begins when it is first asked for. Nothing is kept but in memory, and nobody is called.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from typing import Final, TypeVar

from contracts.entries import Accepted, StreamEntry, Terminal
from contracts.errors import ApiError, ErrorCode
from contracts.identity import Principal, make_request_id
from contracts.limits import Admission
from contracts.stream_ids import START, StreamId
from contracts.tiers import Status
from contracts.token_stream import Appended
from producers.chat_request import ChatRequest, parse_chat_request
from producers.idempotency import Once, once_of
from streaming_edge.terminal import BEFORE_SEAL

from ..settings import Settings
from .playing import Playing
from .recordings import Recording, TimedEntry

#: Requests that can be read at once; the oldest make room.
_MOST_PLAYINGS: Final = 1_000
_PAGE: Final = 256
_PATIENCE_MS: Final = 24 * 3_600_000
V = TypeVar("V")


class _Played:
    """A request, and how its readers hear that it was ended before its time."""

    def __init__(self, playing: Playing) -> None:
        self.playing = playing
        self.sealed = asyncio.Event()

    def seal(self, terminal: Terminal) -> bool:
        """End it, unless it has ended."""
        self.sealed.set()
        return self.playing.seal(terminal, _now())


class PlayedReader:
    """Implements :class:`streaming_edge.protocols.EntrySource`."""

    def __init__(self, played: _Played, cursor: StreamId) -> None:
        self._played = played
        self._cursor = cursor
        self.ended = False

    async def next(self, timeout_seconds: float) -> list[StreamEntry]:
        """The next entries, when they are due; empty after a timeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        playing = self._played.playing
        while not self.ended:
            now = loop.time()
            entries = playing.after(self._cursor, now, _PAGE)
            if entries:
                self._cursor = entries[-1].id
                self.ended = self._cursor.is_seal
                return entries
            if now >= deadline:
                break
            due = playing.due(self._cursor)
            try:
                async with asyncio.timeout_at(deadline if due is None else min(deadline, due)):
                    await self._played.sealed.wait()
            except TimeoutError:
                pass
        return []


class Player:
    """Implements :class:`producers.protocols.ChatIntake`, :class:`streaming_edge.protocols.StreamHub` and
    :class:`streaming_edge.protocols.StreamStore`.

    Args:
        recordings: at least one.
        speed: 1 = at the recorded times, 2 = twice as fast; None = all at once.
        settings: what bodies are validated by.
    """

    def __init__(self, recordings: Sequence[Recording], speed: float | None, settings: Settings) -> None:
        self._recorded = {recording.request_id: recording for recording in recordings}
        self._next = cycle(recordings)
        self._speed = speed
        self._settings = settings
        self._requests: OrderedDict[str, _Played] = OrderedDict()
        self._once: OrderedDict[str, tuple[Once, str]] = OrderedDict()

    async def accept(
        self,
        principal: Principal,
        body: object,
        *,
        traceparent: str | None = None,
        idempotency_key: str | None = None,
    ) -> Admission:
        """See :class:`streaming_edge.protocols.Intake`. A valid body is answered whatever it asks."""
        request = parse_chat_request(body, self._settings, principal)
        once = once_of(idempotency_key, body)
        return await self.submit(principal, request, traceparent=traceparent, once=once)

    async def submit(
        self,
        principal: Principal,
        request: ChatRequest,
        *,
        traceparent: str | None = None,
        once: Once | None = None,
    ) -> Admission:
        """See :class:`producers.protocols.ChatIntake`."""
        if once is not None and once.key in self._once:
            earlier, request_id = self._once[once.key]
            if earlier != once:
                raise ApiError(
                    ErrorCode.IDEMPOTENCY_MISMATCH, "This idempotency key was used with another body."
                )
            if request_id in self._requests:
                return Admission(request_id)
        request_id = make_request_id(_unix_ms(), secrets.token_bytes(10))
        self._begin(request_id, next(self._next), principal, request.model)
        if once is not None:
            self._once[once.key] = (once, request_id)
            _bound(self._once)
        return Admission(request_id)

    async def cancel(self, principal: Principal, request_id: str) -> None:
        """See :class:`streaming_edge.protocols.Intake`."""
        self._find(principal, request_id).seal(Terminal(status=Status.CANCELLED))

    async def authorize(self, principal: Principal, request_id: str) -> None:
        """See :class:`streaming_edge.protocols.Intake`."""
        self._find(principal, request_id)

    async def seal(self, request_id: str, terminal: Terminal) -> Appended:
        """See :class:`contracts.token_stream.TokenStreams`."""
        played = self._requests.get(request_id)
        if played is None:
            return Appended.GONE
        return Appended.OK if played.seal(terminal) else Appended.SEALED

    @asynccontextmanager
    async def subscribe(self, request_id: str, after: StreamId) -> AsyncIterator[PlayedReader]:
        """See :class:`streaming_edge.protocols.StreamHub`."""
        played = self._requests.get(request_id)
        if played is None:
            raise _not_found()
        yield PlayedReader(played, BEFORE_SEAL if after.is_seal else after)

    async def read(self, request_id: str, after: StreamId, limit: int) -> list[StreamEntry]:
        """See :class:`streaming_edge.protocols.StreamStore`."""
        played = self._requests.get(request_id)
        return played.playing.after(after, _now(), limit) if played is not None else []

    async def read_all(self, request_id: str) -> list[StreamEntry]:
        """See :class:`streaming_edge.protocols.StreamStore`."""
        return await self.read(request_id, START, sys.maxsize)

    async def last_ids(self, request_ids: Sequence[str]) -> list[StreamId | None]:
        """See :class:`streaming_edge.protocols.StreamStore`."""
        found = [self._requests.get(request_id) for request_id in request_ids]
        return [played.playing.last_id(_now()) if played is not None else None for played in found]

    async def has_entry(self, request_id: str, entry_id: StreamId) -> bool:
        """See :class:`streaming_edge.protocols.StreamStore`."""
        return any(item.id == entry_id for item in await self.read_all(request_id))

    def _find(self, principal: Principal, request_id: str) -> _Played:
        """A request that runs or has ended, or the recording of that id, which begins now.

        Raises:
            ApiError: ``not_found``.
        """
        if request_id not in self._requests:
            if request_id not in self._recorded:
                raise _not_found()
            self._begin(
                request_id, self._recorded[request_id], principal, next(iter(self._settings.models))
            )
        return self._requests[request_id]

    def _begin(self, request_id: str, recording: Recording, principal: Principal, model: str) -> None:
        """Play a recording from now on; ``model`` stands where nobody knows what ran it."""
        (_, first), *rest = recording.entries
        now_ms = _unix_ms()
        assert isinstance(first.entry, Accepted)
        accepted = first.entry.model_copy(
            update={
                "tenant": principal.tenant,
                "key_id": principal.key_id,
                "tier": principal.tier,
                "model": first.entry.model or model,
                "created_ms": now_ms,
                "deadline_ms": now_ms + _PATIENCE_MS,
                "traceparent": None,
            }
        )
        entries = [TimedEntry(0, StreamEntry(first.id, accepted)), *rest]
        self._requests[request_id] = _Played(Playing(entries, _now(), self._speed))
        _bound(self._requests)


def _bound(kept: OrderedDict[str, V]) -> None:
    while len(kept) > _MOST_PLAYINGS:
        kept.popitem(last=False)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


def _not_found() -> ApiError:
    return ApiError(ErrorCode.NOT_FOUND, "There is no such request.")
