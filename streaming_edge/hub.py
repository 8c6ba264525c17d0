"""Reads the token streams of all subscribers of this process over one connection, and fans them out.

Every entry is read and decoded once, however many readers it has. Each reader has a cursor and a bounded
buffer of its own (:mod:`streaming_edge.reader_state`), so a slow one costs bounded memory and holds up
nobody. A stream that nobody reads is not read; a stream that vanishes under its readers ends them with
:class:`~streaming_edge.errors.StreamLost`, within seconds, never with silence. Which requests are read here
is told to whoever ends those that all readers have left (:mod:`streaming_edge.vouching`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import redis.asyncio as redis
from redis.exceptions import RedisError

from contracts.continuity import joins, tokens_after, tokens_at
from contracts.entries import StreamEntry, decode_entry
from contracts.stream_ids import MAX_PART, StreamId
from contracts.token_stream import StreamsUnavailable
from infra.presence_redis import ReaderPresence
from infra.stream_redis import RedisTokenStreams, stream_key
from infra.tasks import end_tasks
from infra.telemetry import CATCH_UPS, READERS

from .errors import StreamLost
from .reader_redis import RawStreams, StreamTail
from .reader_state import ReaderState
from .terminal import BEFORE_SEAL
from .vouching import Voucher

log = logging.getLogger(__name__)

_BLOCK_MS = 2_000
_CHECK_SECONDS = 2.0
_CHECK_BATCH = 256
#: How long a stream may be shorter than what was read of it: a worker that lives writes again what its store
#: has lost, as soon as it is back.
_REPAIR_SECONDS = 4.0
_RETRY_SECONDS = 0.25
_BACKOFF_SECONDS = (0.05, 1.0)
#: Entries decoded before other tasks get a turn.
_DECODE_BATCH = 1_024
#: With many streams a short pause after a read lets one read carry many entries: a read's cost grows with
#: the number of streams it names, not with what it brings.
_PAUSE_FROM_STREAMS = 32
_PAUSE_SECONDS = 0.002


class _Feed:
    """One stream as the reading loop sees it."""

    __slots__ = (
        "checked",
        "key",
        "lost",
        "overtaken",
        "position",
        "position_text",
        "readers",
        "request_id",
        "short_since",
    )

    def __init__(self, request_id: str, key: bytes, position: StreamId) -> None:
        self.request_id = request_id
        self.key = key
        self.position = position
        self.position_text = str(position).encode()
        self.checked = position
        self.overtaken: StreamId | None = None
        self.short_since: float | None = None
        self.lost = False
        self.readers: list[Subscription] = []

    def wake_all(self) -> None:
        for reader in self.readers:
            reader.wake()


class Subscription:
    """One reader's cursor in one stream. Used by one task at a time."""

    def __init__(self, hub: Hub, feed: _Feed, state: ReaderState, tokens_out: int | None) -> None:
        self._hub = hub
        self._feed = feed
        self._tokens_out = tokens_out
        self._broken = False
        self._waiter: asyncio.Future[None] | None = None
        self.state = state
        self.ended = False

    def wake(self) -> None:
        """Let a waiting :meth:`next` look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self, timeout_seconds: float) -> list[StreamEntry]:
        """The next entries after the cursor, in order, each exactly once; empty after a timeout.

        ``ended`` is True once the terminal entry has been returned. May be cancelled at any time without
        losing entries.

        Raises:
            StreamLost: the stream is gone before its terminal entry was read, or what it holds after the
                cursor does not join what was read before.
            StreamsUnavailable: the hub has stopped; the reader may go on elsewhere from its offset.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while not self.ended:
            if self._broken:
                raise StreamLost(self._feed.request_id)
            entries = await self._page() if self.state.behind else self.state.take()
            if entries and (entries := self._joined(entries)):
                self.ended = entries[-1].id.is_seal
                return entries
            if self._feed.lost or self._broken:
                raise StreamLost(self._feed.request_id)
            if self._hub.stopped:
                raise StreamsUnavailable("the hub has stopped")
            now = loop.time()
            if now >= deadline:
                break
            # Behind and without a page: Redis is unreachable, and nothing will wake us when it is back.
            await self._wait(
                loop, min(deadline, now + _RETRY_SECONDS) if self.state.behind else deadline
            )
        return []

    def _joined(self, entries: list[StreamEntry]) -> list[StreamEntry]:
        """The entries up to the first that does not join: then a part of the reply was lost or rewritten."""
        for at, item in enumerate(entries):
            if not joins(self._tokens_out, item):
                log.error(
                    "a stream does not join what was read of it",
                    extra={"request_id": self._feed.request_id, "entry": str(item.id)},
                )
                self._broken = True
                return entries[:at]
            self._tokens_out = tokens_after(self._tokens_out, item)
        return entries

    async def _page(self) -> list[StreamEntry]:
        try:
            page = await self._hub.streams.read(
                self._feed.request_id, self.state.cursor, self.state.limit
            )
        except StreamsUnavailable:
            return []
        if not self.state.page(page):
            raise StreamLost(self._feed.request_id)
        return page

    async def _wait(self, loop: asyncio.AbstractEventLoop, until: float) -> None:
        self._waiter = loop.create_future()
        timer = loop.call_at(until, self.wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None


class Hub:
    """The readers of one process.

    Args:
        streams: for catching up and for checking that streams still exist.
        reader_client: made with ``connect(..., blocking=True)``; the hub does not close it.
        buffer_entries: entries held per reader before it catches up from Redis.
        presence: where it is told which requests have readers here.

    Attributes:
        sending_away: set when readers are told to go on elsewhere: their leaving is no departure then, and
            they have some seconds to come back (:data:`infra.presence_redis.VOUCH_MS`).
    """

    def __init__(
        self,
        streams: RedisTokenStreams,
        reader_client: redis.Redis,
        buffer_entries: int,
        presence: ReaderPresence,
    ) -> None:
        self.streams = streams
        self.stopped = False
        self.sending_away = False
        self._voucher = Voucher(presence, lambda: [f.request_id for f in self._unsealed.values()])
        self._buffer_entries = buffer_entries
        self._tail = StreamTail(reader_client, _BLOCK_MS)
        self._feeds: dict[bytes, _Feed] = {}
        self._unsealed: dict[bytes, _Feed] = {}
        self._connected = False
        self._changes = 0
        self._changes_read = 0
        self._changed = asyncio.Event()
        self._check_now = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin reading. Redis may still be down: see :meth:`not_ready`."""
        self._tasks = [
            asyncio.create_task(self._read_loop(), name="hub-read"),
            asyncio.create_task(self._wake_loop(), name="hub-wake"),
            asyncio.create_task(self._check_loop(), name="hub-check"),
            asyncio.create_task(self._voucher.run(), name="hub-vouch"),
        ]

    async def run(self) -> None:
        """Return or raise only when reading has ended for good."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def stop(self) -> None:
        """End reading; readers that wait get :class:`StreamsUnavailable`. Idempotent."""
        self.stopped = True
        tasks, self._tasks = self._tasks, []
        await end_tasks(tasks)
        await self._tail.disconnect()
        for feed in self._feeds.values():
            feed.wake_all()

    def not_ready(self) -> str | None:
        """Why nothing can be read right now, or None."""
        if not self._tasks or any(task.done() for task in self._tasks):
            return "the reading loop is not running"
        return None if self._connected else "not connected to Redis"

    @asynccontextmanager
    async def subscribe(self, request_id: str, after: StreamId) -> AsyncIterator[Subscription]:
        """Read a stream after an offset.

        The caller has checked that the stream exists and that ``after`` is in it
        (:mod:`streaming_edge.offsets`). After the seal's own offset the terminal entry is given once
        more, so that a reading always ends with it.
        """
        cursor = BEFORE_SEAL if after.is_seal else after
        tokens_out = tokens_at(cursor)
        if tokens_out is None and cursor.is_attempt_start:
            tokens_out = await self._tokens_at_start(request_id, cursor)
        key = stream_key(request_id).encode()
        feed = self._feeds.get(key)
        if feed is None:
            feed = _Feed(request_id, key, cursor)
            self._feeds[key] = self._unsealed[key] = feed
            self._changes += 1
            self._changed.set()
            self._voucher.came(request_id)
        state = ReaderState(self._buffer_entries, cursor, feed.position)
        subscription = Subscription(self, feed, state, tokens_out)
        feed.readers.append(subscription)
        READERS.inc()
        try:
            yield subscription
        finally:
            READERS.dec()
            feed.readers.remove(subscription)
            if not feed.readers and self._feeds.get(key) is feed:
                del self._feeds[key]
                if self._unsealed.pop(key, None) is None or self.sending_away or self.stopped:
                    self._voucher.gone(request_id)
                else:
                    self._voucher.left(request_id)

    async def _tokens_at_start(self, request_id: str, start: StreamId) -> int | None:
        try:
            page = await self.streams.read(request_id, StreamId(start.attempt - 1, MAX_PART), 1)
        except StreamsUnavailable:
            return None
        return tokens_after(None, page[0]) if page and page[0].id == start else None

    async def _read_loop(self) -> None:
        backoff, longest = _BACKOFF_SECONDS
        while True:
            try:
                await self._tail.connect()
                self._connected = True
                self._check_now.set()
                while True:
                    streams = self._unsealed.copy()
                    self._changes_read = self._changes
                    positions = [feed.position_text for feed in streams.values()]
                    raw = await self._tail.read(streams, positions, self._changes_read)
                    backoff = _BACKOFF_SECONDS[0]
                    if raw:
                        await self._deliver(raw, streams)
                        if len(streams) >= _PAUSE_FROM_STREAMS:
                            await asyncio.sleep(_PAUSE_SECONDS)
            except (RedisError, OSError, TimeoutError) as error:
                if self._connected:
                    log.warning("reading from Redis failed", extra={"error": type(error).__name__})
                self._connected = False
                await self._tail.disconnect()
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, longest)

    async def _deliver(self, raw: RawStreams, streams: dict[bytes, _Feed]) -> None:
        decoded = 0
        for key, items in raw:
            feed = streams.get(key)
            # What was read for a feed that has ended since must not reach a newer one of the same stream,
            # which began at another offset.
            if feed is None or self._unsealed.get(key) is not feed:
                continue
            try:
                entries = [_entry(entry_id, fields) for entry_id, fields in items]
            except ValueError as error:
                log.error("foreign entry", extra={"request_id": feed.request_id, "error": str(error)})
                self._lose(feed)
                continue
            feed.position = entries[-1].id
            feed.position_text = items[-1][0]
            if feed.position.is_seal:
                del self._unsealed[key]
                self._voucher.gone(feed.request_id)
            _push(feed.readers, entries)
            decoded += len(entries)
            if decoded >= _DECODE_BATCH:
                decoded = 0
                await asyncio.sleep(0)

    async def _wake_loop(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._changes_read >= self._changes:
                continue
            try:
                async with asyncio.timeout(_BLOCK_MS / 1000):
                    await self._tail.wake(self._changes)
            except (RedisError, OSError, TimeoutError):
                continue  # the read's own block runs out soon, and then it sees the change

    async def _check_loop(self) -> None:
        """Find the streams that have vanished: Redis keeps a reader of a missing key waiting for ever."""
        while True:
            try:
                async with asyncio.timeout(_CHECK_SECONDS):
                    await self._check_now.wait()
            except TimeoutError:
                pass
            self._check_now.clear()
            quiet = [feed for feed in self._unsealed.values() if feed.position == feed.checked]
            for feed in self._unsealed.values():
                feed.checked = feed.position
            for start in range(0, len(quiet), _CHECK_BATCH):
                await self._check(quiet[start : start + _CHECK_BATCH])

    async def _check(self, feeds: list[_Feed]) -> None:
        positions = [feed.position for feed in feeds]
        try:
            last_ids = await self.streams.last_ids([feed.request_id for feed in feeds])
        except StreamsUnavailable:
            return
        now = asyncio.get_running_loop().time()
        outdated = False
        for feed, position, last in zip(feeds, positions, last_ids, strict=True):
            if self._unsealed.get(feed.key) is not feed:
                continue
            if last is None or (last < position and now - _since(feed, now) >= _REPAIR_SECONDS):
                log.warning("a stream vanished", extra={"request_id": feed.request_id})
                self._lose(feed)
            elif last >= position:
                feed.short_since = None
            # Twice in a row there is more than the reading loop has been given: it reads another server.
            outdated = outdated or (last is not None and last > position and feed.overtaken == position)
            feed.overtaken = position if last is not None and last > position else None
        if outdated and self._connected:
            log.warning("reading from an outdated server, connecting again")
            await self._tail.disconnect()

    def _lose(self, feed: _Feed) -> None:
        feed.lost = True
        # Whoever subscribes from now on looks afresh.
        del self._unsealed[feed.key]
        del self._feeds[feed.key]
        self._voucher.gone(feed.request_id)
        feed.wake_all()


def _since(feed: _Feed, now: float) -> float:
    """Since when its stream has been shorter than what was read of it."""
    if feed.short_since is None:
        feed.short_since = now
    return feed.short_since


def _push(readers: Sequence[Subscription], entries: list[StreamEntry]) -> None:
    for reader in readers:
        if reader.state.push(entries):
            CATCH_UPS.inc()
        reader.wake()


def _entry(raw_id: bytes, fields: list[bytes]) -> StreamEntry:
    attempt, token = raw_id.split(b"-")
    entry_id = StreamId(int(attempt), int(token))
    pairs = iter(fields)
    return StreamEntry(entry_id, decode_entry(entry_id, dict(zip(pairs, pairs, strict=True))))
