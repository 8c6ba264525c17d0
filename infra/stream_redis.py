"""Token streams in Redis: the adapter behind :class:`contracts.token_stream.TokenStreams`, and leases.

Keys of one request share a hash tag, so that they live in one cluster slot::

    hr:{<request id>}:s      the stream
    hr:{<request id>}:owner  who may read it, and which conversation it belongs to (outlives the stream)
    hr:{<request id>}:lease  the worker that runs it, for a short time

``hr:open`` names every open request (:mod:`infra.open_requests_redis`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis.asyncio as redis
from pydantic import BaseModel, ConfigDict
from redis.asyncio.client import Pipeline
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from contracts.entries import (
    Accepted,
    Appendable,
    SealAfter,
    StartAfter,
    StreamEntry,
    Terminal,
    decode_entry,
    encode_entry,
)
from contracts.stream_ids import ACCEPTED, SEAL, START, StreamId
from contracts.token_stream import Appended

from .open_requests_redis import OPEN_KEY
from .presence_redis import readers_key
from .redis_connections import connect
from .redis_errors import reachable, unavailable
from .settings import StreamSettings

__all__ = [
    "Owner",
    "RedisTokenStreams",
    "connect",
    "request_id_of",
    "stream_entry",
    "stream_key",
]

# Redis gives these two refusals no code of their own, so their words are the interface.
_FENCED = "equal or smaller"
_SEALED = "exhausted the last possible ID"
_ANY = "*"
_APPEND_RUN = Path(__file__).with_name("append_run.lua").read_text()
_APPEND_AFTER = Path(__file__).with_name("append_after.lua").read_text()


def stream_key(request_id: str) -> str:
    """Key of a request's token stream."""
    return f"hr:{{{request_id}}}:s"


def request_id_of(key: bytes) -> str:
    """Inverse of :func:`stream_key`."""
    return key[4:-3].decode()


class Owner(BaseModel):
    """Who may read a stream, remembered longer than the stream itself."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    tenant: str
    conversation_id: str | None = None
    model: str


def _appended(result: Any) -> Appended:
    """Meaning of XADD's reply (``NOMKSTREAM`` is always set)."""
    if result is None:
        return Appended.GONE
    if isinstance(result, ResponseError):
        words = str(result)
        if _SEALED in words:
            return Appended.SEALED
        if _FENCED in words:
            return Appended.FENCED
    if isinstance(result, RedisError):
        raise unavailable(result) from result
    return Appended.OK


class RedisTokenStreams:
    """Token streams in one Redis (or Redis Cluster through its proxy)."""

    def __init__(self, client: redis.Redis, settings: StreamSettings) -> None:
        self._redis: Any = client  # redis-py types replies for every protocol version at once
        self._settings = settings

    async def ping(self) -> None:
        """Raise :class:`StreamsUnavailable` unless Redis answers."""
        async with reachable():
            await self._redis.ping()

    async def create(self, request_id: str, accepted: Accepted) -> None:
        """See :class:`contracts.token_stream.TokenStreams`."""
        owner = Owner(
            tenant=accepted.tenant,
            conversation_id=accepted.conversation_id,
            model=accepted.model,
        )
        keep = self._settings.open_ttl_seconds + self._settings.memory_seconds
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            key = stream_key(request_id)
            # A transaction of this request's own keys alone: the index may live in another cluster slot.
            pipe.execute_command("MULTI")
            pipe.xadd(key, encode_entry(accepted), id=str(ACCEPTED))
            pipe.expire(key, self._settings.open_ttl_seconds)
            pipe.set(_owner_key(request_id), owner.model_dump_json(), ex=keep)
            pipe.execute_command("EXEC")
            pipe.execute_command("ZADD", OPEN_KEY, accepted.created_ms, request_id)
            *queued, done, _ = await pipe.execute(raise_on_error=False)
        # Ids are never used twice, so an entry that is there already is our own, sent again by a retry.
        for result in (*queued, *(done if isinstance(done, list) else [done])):
            _appended(result)

    async def append(self, writes: Sequence[tuple[str, StreamId, Appendable]]) -> list[Appended]:
        """See :class:`contracts.token_stream.TokenStreams`."""
        if len({write[0] for write in writes}) == len(writes):
            async with reachable(), self._redis.pipeline(transaction=False) as pipe:
                for request_id, entry_id, entry in writes:
                    _xadd(pipe, request_id, entry_id, entry)
                results = [_appended(r) for r in await pipe.execute(raise_on_error=False)]
        else:
            results = await self._append_runs(writes)
        ended = [
            rid
            for (rid, entry_id, _), r in zip(writes, results, strict=True)
            if entry_id == SEAL and r is Appended.OK
        ]
        if ended:
            await self._retain(ended)
        return results

    async def _append_runs(self, writes: Sequence[tuple[str, StreamId, Appendable]]) -> list[Appended]:
        """:meth:`append` where streams get more than one entry: these are taken or refused together."""
        runs = _runs(writes)
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            for run in runs:
                if len(run) == 1:
                    _xadd(pipe, *writes[run[0]])
                else:
                    _xadd_run(pipe, [writes[at] for at in run])
            answers = await pipe.execute(raise_on_error=False)
        results: dict[int, Appended] = {}
        for run, answer in zip(runs, answers, strict=True):
            # One error for a whole run that Redis did not even try, else an answer for each entry.
            each = answer if len(run) > 1 and isinstance(answer, list) else [answer] * len(run)
            results |= zip(run, map(_appended, each), strict=True)
        return [results[at] for at in range(len(writes))]

    async def seal(self, request_id: str, terminal: Terminal) -> Appended:
        """See :class:`contracts.token_stream.TokenStreams`."""
        return (await self.seal_many([(request_id, terminal)]))[0]

    async def seal_many(self, seals: Sequence[tuple[str, Terminal]]) -> list[Appended]:
        """:meth:`seal` for several requests in one round trip (two, to start their retention)."""
        return await self.append([(rid, SEAL, terminal) for rid, terminal in seals])

    async def _retain(self, request_ids: Sequence[str]) -> None:
        """Start the retention time of sealed streams. Where this fails, they live for the open time."""
        keep = self._settings.retention_seconds
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            for rid in request_ids:
                pipe.expire(stream_key(rid), keep)
                pipe.expire(_owner_key(rid), keep + self._settings.memory_seconds)
                pipe.delete(_lease_key(rid))
                pipe.delete(readers_key(rid))
            pipe.execute_command("ZREM", OPEN_KEY, *request_ids)
            await pipe.execute()

    async def shorten(self, request_ids: Sequence[str], seconds: int) -> None:
        """Let these sealed streams, and the memory of them, live only so long from now on."""
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            for rid in request_ids:
                pipe.expire(stream_key(rid), seconds)
                pipe.expire(_owner_key(rid), seconds)
            await pipe.execute()

    async def read(self, request_id: str, after: StreamId, limit: int) -> list[StreamEntry]:
        """See :class:`contracts.token_stream.TokenStreams`."""
        if after.is_seal:
            return []  # Redis refuses an interval that begins after the last possible id
        low = "-" if after == START else f"({after}"
        async with reachable():
            raw = await self._redis.xrange(stream_key(request_id), min=low, max="+", count=limit)
        return [stream_entry(entry_id, fields) for entry_id, fields in raw]

    async def read_all(self, request_id: str, page: int = 1_000) -> list[StreamEntry]:
        """The whole stream as it is now, read in pages."""
        items: list[StreamEntry] = []
        while True:
            more = await self.read(request_id, items[-1].id if items else START, page)
            items += more
            if len(more) < page:
                return items

    async def last_ids(self, request_ids: Sequence[str]) -> list[StreamId | None]:
        """See :class:`contracts.token_stream.TokenStreams`."""
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            for rid in request_ids:
                pipe.xrevrange(stream_key(rid), count=1)
            results = await pipe.execute()
        return [StreamId.parse(r[0][0].decode()) if r else None for r in results]

    async def accepted_entries(self, request_ids: Sequence[str]) -> list[Accepted | None]:
        """Each stream's ``0-1`` entry; None where there is no stream, or something else in its place."""
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            for rid in request_ids:
                pipe.xrange(stream_key(rid), min=str(ACCEPTED), max=str(ACCEPTED), count=1)
            results = await pipe.execute()
        return [_accepted(raw) for raw in results]

    async def has_entry(self, request_id: str, entry_id: StreamId) -> bool:
        """Whether the stream holds an entry with exactly this id."""
        async with reachable():
            found = await self._redis.xrange(
                stream_key(request_id), min=str(entry_id), max=str(entry_id), count=1
            )
        return bool(found)

    async def owner(self, request_id: str) -> Owner | None:
        """Who may read the stream; None when it was never accepted here or is long forgotten."""
        async with reachable():
            raw = await self._redis.get(_owner_key(request_id))
        return None if raw is None else Owner.model_validate_json(raw)

    async def disown(self, request_id: str) -> None:
        """Forget who may read the stream: nobody finds it any more. Who reads it goes on."""
        async with reachable():
            await self._redis.delete(_owner_key(request_id))

    async def renew_leases(self, request_ids: Sequence[str], worker_id: str) -> None:
        """Keep the leases of requests whose tokens come, and their streams alive.

        Where Redis has no memory left for a command that writes, leases that are still there are prolonged:
        otherwise every worker would be taken for dead at once.
        """
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            for rid in request_ids:
                self._renew(pipe, rid, worker_id)
            try:
                await pipe.execute()
            except OutOfMemoryError:
                for rid in request_ids:
                    pipe.pexpire(_lease_key(rid), self._settings.lease_ms)
                await pipe.execute()

    async def give_up_leases(self, request_ids: Sequence[str], worker_id: str) -> None:
        """End this worker's leases, so that nobody waits for them to run out; others' are left alone."""
        if not request_ids:
            return
        holders = await self.lease_holders(request_ids)
        ours = [rid for rid, holder in zip(request_ids, holders, strict=True) if holder == worker_id]
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            for rid in ours:
                pipe.delete(_lease_key(rid))
            await pipe.execute()

    async def lease_holders(self, request_ids: Sequence[str]) -> list[str | None]:
        """The worker that holds each request's lease; None where it has run out."""
        async with reachable(), self._redis.pipeline(transaction=False) as pipe:
            for rid in request_ids:
                pipe.get(_lease_key(rid))
            results = await pipe.execute()
        return [r.decode() if r is not None else None for r in results]

    def _renew(self, pipe: Pipeline, request_id: str, worker_id: str) -> None:
        pipe.set(_lease_key(request_id), worker_id, px=self._settings.lease_ms)
        pipe.expire(stream_key(request_id), self._settings.open_ttl_seconds)


def stream_entry(entry_id: bytes, fields: dict[bytes, bytes]) -> StreamEntry:
    """A raw stream entry as redis-py gives it, decoded."""
    parsed = StreamId.parse(entry_id.decode())
    return StreamEntry(parsed, decode_entry(parsed, fields))


def _accepted(raw: list[tuple[bytes, dict[bytes, bytes]]]) -> Accepted | None:
    try:
        entry = stream_entry(*raw[0]).entry if raw else None
    except ValueError:
        return None
    return entry if isinstance(entry, Accepted) else None


def _owner_key(request_id: str) -> str:
    return f"hr:{{{request_id}}}:owner"


def _lease_key(request_id: str) -> str:
    return f"hr:{{{request_id}}}:lease"


def _runs(writes: Sequence[tuple[str, StreamId, Appendable]]) -> list[list[int]]:
    """Which writes must be taken or refused together: those of one stream without a condition, by index."""
    runs: list[list[int]] = []
    open_runs: dict[str, list[int]] = {}
    for at, (request_id, entry_id, entry) in enumerate(writes):
        if entry_id == SEAL or isinstance(entry, StartAfter):
            runs.append([at])
            open_runs.pop(request_id, None)
        elif (run := open_runs.get(request_id)) is not None:
            run.append(at)
        else:
            open_runs[request_id] = run = [at]
            runs.append(run)
    return runs


def _xadd_run(pipe: Pipeline, writes: Sequence[tuple[str, StreamId, Appendable]]) -> None:
    parts: list[str | bytes | int] = []
    for _, entry_id, entry in writes:
        assert not isinstance(entry, SealAfter | StartAfter)
        fields = encode_entry(entry)
        parts += (str(entry_id), 2 * len(fields))
        for name, value in fields.items():
            parts += (name, value)
    pipe.execute_command("EVAL", _APPEND_RUN, 1, stream_key(writes[0][0]), *parts)


def _xadd(pipe: Pipeline, request_id: str, entry_id: StreamId, entry: Appendable) -> None:
    # The raw command: redis-py's xadd() costs twice as much, and this runs once a token.
    parts: list[str | bytes] = []
    after = None
    if isinstance(entry, SealAfter):
        after, entry = entry.after, entry.terminal
    elif isinstance(entry, StartAfter):
        after, entry = entry.after, entry.started
    for name, value in encode_entry(entry).items():
        parts += (name, value)
    key = stream_key(request_id)
    if after is not None or entry_id == SEAL:
        # EVAL, not EVALSHA: once a reply, and no script cache that a restart empties (H5).
        expected = _ANY if after is None else str(after)
        pipe.execute_command("EVAL", _APPEND_AFTER, 1, key, expected, str(entry_id), *parts)
    else:
        pipe.execute_command("XADD", key, "NOMKSTREAM", str(entry_id), *parts)
