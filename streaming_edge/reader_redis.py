"""Tailing many Redis streams over one dedicated connection.

One blocking XREAD covers all streams and one control stream of the tail's own, which is appended to when
the set of streams changes, so that the read returns at once. The connection belongs to the tail alone: it
never comes from a pool or goes back to one, so a read that is cancelled half-way leaves its late reply to
nobody.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Iterable
from typing import Any

import redis.asyncio as redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

#: ``(key, [(entry id, [name, value, ...]), ...])`` for each stream with news, as Redis sends it.
RawStreams = list[tuple[bytes, list[tuple[bytes, list[bytes]]]]]

#: Entries of one stream in one read: bounds how long decoding holds the event loop.
READ_COUNT = 64

_CONTROL_TTL_MS = 3_600_000
_GRACE_SECONDS = 3.0


class StreamTail:
    """One blocking reader.

    Args:
        client: whose connection settings are used; commands that wake the read go through its pool.
        block_ms: how long a read waits when nothing happens.
    """

    def __init__(self, client: redis.Redis, block_ms: int) -> None:
        self._client: Any = client
        self._deadline_seconds = block_ms / 1000 + _GRACE_SECONDS
        self._control = f"hr:edge:{{{secrets.token_hex(8)}}}:control".encode()
        self._head = (b"XREAD", b"COUNT", READ_COUNT, b"BLOCK", block_ms, b"STREAMS", self._control)
        self._connection: Any = None

    async def connect(self) -> None:
        """Connect if not connected, and hear from Redis once.

        Raises:
            TimeoutError: Redis does not answer in time.
            redis.exceptions.RedisError: Redis cannot be reached, or is loading.
            OSError: likewise.
        """
        if self._connection is None:
            connection = self._client.connection_pool.make_connection()
            try:
                async with asyncio.timeout(_GRACE_SECONDS):
                    await connection.connect()
                    await connection.send_command("PING", check_health=False)
                    await connection.read_response(timeout=math.inf)
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
            self._connection = connection

    async def disconnect(self) -> None:
        """Drop the connection; the next :meth:`connect` makes a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)

    async def read(self, keys: Iterable[bytes], after: Iterable[bytes], wake: int) -> RawStreams:
        """Entries behind ``after`` of the streams ``keys``, or nothing after ``block_ms``.

        Args:
            wake: returns at once if :meth:`wake` was called with a larger number.

        Raises:
            TimeoutError: Redis did not keep to ``block_ms``.
            redis.exceptions.RedisError: the connection broke, or Redis refused the command.
        """
        connection = self._connection
        if connection is None or connection.outdated:
            raise RedisConnectionError("the connection is gone, or its server was demoted")
        await connection.send_command(*self._head, *keys, b"%d-0" % wake, *after, check_health=False)
        # An infinite timeout keeps the client's socket timeout, which may be shorter than the block, out
        # of it; redis-py's own finite one would answer None, which also stands for "nothing new".
        async with asyncio.timeout(self._deadline_seconds):
            return await connection.read_response(timeout=math.inf) or []

    async def wake(self, number: int) -> None:
        """Make a read that began with a smaller number return at once."""
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.execute_command("XADD", self._control, "MAXLEN", 1, b"%d-0" % number, "w", "")
            pipe.pexpire(self._control, _CONTROL_TTL_MS)
            results = await pipe.execute(raise_on_error=False)
        # A refused id means that a later wake has overtaken this one.
        if isinstance(results[0], Exception) and not isinstance(results[0], ResponseError):
            raise results[0]
