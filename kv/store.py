"""Chunks in Redis: looked up in one round trip, read and written without a copy in between.

redis-py makes, authenticates and pools the connections. Values of megabytes do not go through it: its
parser copies them with the interpreter lock held, which would hold up the engine's own thread; here they go
between the socket and the caller's buffer, and the lock is free meanwhile. What that gains is measured in
``docs/KV_CACHE.md``.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from redis import ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import RedisClusterException, RedisError
from redis.retry import Retry

from .errors import TierUnavailable

_LINE_BYTES = 512


class ChunkStore:
    """Redis as a store of chunks; of one thread or several. Connects when it is first used.

    Every call ends within its ``seconds``.
    """

    def __init__(self, url: str, *, connections: int, cluster: bool = False) -> None:
        """A store in the Redis (or cluster, of which ``url`` names any node).

        Args:
            connections: at most so many, to each node.
        """
        self._url = url
        self._options: dict[str, Any] = {
            "socket_keepalive": True,
            "protocol": 2,
            "max_connections": connections,
            # A failed call is a miss; whether to try again is the caller's to decide.
            "retry": Retry(NoBackoff(), 0),
        }
        self._cluster = cluster
        self._made: Any = None
        self._making = threading.Lock()
        self._moved = False  # keys may be on other nodes of the cluster than when they were last seen

    def touch(self, keys: Sequence[str], ttl_ms: int, seconds: float) -> list[bool]:
        """Which keys are there; those have been used, and live on for ``ttl_ms``. One round trip.

        Raises:
            TierUnavailable: no answer.
        """
        with self._unavailable():
            pipeline = self._client(seconds).pipeline(transaction=False)
            for key in keys:
                pipeline.pexpire(key, ttl_ms)
            return [bool(answer) for answer in pipeline.execute()]

    def read(self, key: str, into: memoryview, seconds: float) -> int | None:
        """Read a value into the start of a buffer.

        Returns:
            Its length in bytes, which is more than the buffer's if it does not fit (the buffer's contents
            are undefined then); None if there is no such key.

        Raises:
            TierUnavailable: no answer, or not all of it in time.
        """
        deadline = time.monotonic() + seconds
        with self._unavailable(), self._connection(key, seconds) as connection:
            connection.send_packed_command(_command(b"GET", key.encode()), check_health=False)
            reply = _Reply(connection._sock, deadline)
            length = reply.length()
            if length is None:
                return None
            if length > len(into):
                connection.disconnect()
                return length
            reply.fill(into[:length])
            reply.end()
            return length

    def write(self, key: str, parts: Sequence[bytes | memoryview], ttl_ms: int, seconds: float) -> None:
        """Store a value, given in parts.

        Raises:
            TierUnavailable: no answer, or a refusal.
        """
        deadline = time.monotonic() + seconds
        size = sum(len(part) for part in parts)
        head = _command(b"SET", key.encode(), size, b"PX", str(ttl_ms).encode())
        with self._unavailable(), self._connection(key, seconds) as connection:
            connection.send_packed_command([head[0], *parts, head[1]], check_health=False)
            _Reply(connection._sock, deadline).ok()

    def delete(self, key: str, seconds: float) -> None:
        """Remove a value that is of no use.

        Raises:
            TierUnavailable: no answer.
        """
        with self._unavailable():
            self._client(seconds).delete(key)

    def infos(self, seconds: float) -> list[tuple[str, dict[str, Any]]]:
        """What the Redis, or each primary of the cluster, says of itself and its memory.

        Raises:
            TierUnavailable: it cannot be asked.
        """
        with self._unavailable():
            client = self._client(seconds)
            if not self._cluster:
                return [(_place(self._url), client.info("server") | client.info("memory"))]
            nodes = [(node.name, client.get_redis_connection(node)) for node in client.get_primaries()]
            return [(name, each.info("server") | each.info("memory")) for name, each in nodes]

    def close(self) -> None:
        """Close all connections."""
        made, self._made = self._made, None
        if made is not None:
            made.close()

    @contextmanager
    def _unavailable(self) -> Iterator[None]:
        """A call; when it has failed, the next one learns anew which node of a cluster has which keys."""
        try:
            with _unavailable():
                yield
        except TierUnavailable:
            self._moved = self._cluster
            raise

    def _client(self, seconds: float) -> Any:
        # Of two clients one would be lost, and take the other thread's connection along.
        with self._making:
            if self._made is None:
                options = self._options | {"socket_timeout": seconds, "socket_connect_timeout": seconds}
                make: Any = RedisCluster if self._cluster else Redis
                self._made = make.from_url(self._url, **options)
            elif self._moved:
                self._moved = False
                self._made.nodes_manager.initialize()
            return self._made

    def _pool(self, key: str, seconds: float) -> ConnectionPool:
        client = self._client(seconds)
        if self._cluster:
            client = client.get_redis_connection(client.get_node_from_key(key))
        pool: ConnectionPool = client.connection_pool
        return pool

    @contextmanager
    def _connection(self, key: str, seconds: float) -> Iterator[Any]:
        """A connection for one command; closed unless its reply was read to the end."""
        pool = self._pool(key, seconds)
        connection: Any = pool.get_connection()
        try:
            connection._sock.settimeout(seconds)
            yield connection
        except BaseException:
            connection.disconnect()
            raise
        finally:
            if connection._sock is not None:
                connection._sock.settimeout(connection.socket_timeout)
            pool.release(connection)


class _Reply:
    """A RESP2 reply, read straight from a socket of which nothing else has been read ahead."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def length(self) -> int | None:
        """Length of the bulk string that follows; None for nil."""
        line = self._line()
        if line[:1] != b"$":
            raise TierUnavailable("refused" if line[:1] == b"-" else "protocol")
        length = int(line[1:])
        return None if length < 0 else length

    def fill(self, buffer: memoryview) -> None:
        """Bytes of the bulk string, as many as the buffer has."""
        at = 0
        while at < len(buffer):
            self._wait()
            got = self._sock.recv_into(buffer[at:])
            if not got:
                raise TierUnavailable("connection")
            at += got

    def end(self) -> None:
        """The end of the bulk string."""
        if self._line():
            raise TierUnavailable("protocol")

    def ok(self) -> None:
        """A simple string."""
        line = self._line()
        if line[:1] != b"+":
            full = line.startswith(b"-OOM")
            raise TierUnavailable("full" if full else "refused" if line[:1] == b"-" else "protocol")

    def _line(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\r\n"):
            self._wait()
            byte = self._sock.recv(1)
            if not byte:
                raise TierUnavailable("connection")
            line += byte
            if len(line) > _LINE_BYTES:
                raise TierUnavailable("protocol")
        return bytes(line[:-2])

    def _wait(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TierUnavailable("timeout")
        self._sock.settimeout(left)


def _command(name: bytes, key: bytes, value_bytes: int | None = None, *more: bytes) -> list[bytes]:
    """A command in RESP: one part, or what goes before and after a value of ``value_bytes`` bytes."""
    before = [name, key]
    count = len(before) + len(more) + (value_bytes is not None)
    head = b"*%d\r\n" % count + b"".join(_bulk(part) for part in before)
    if value_bytes is None:
        return [head]
    tail = b"\r\n" + b"".join(_bulk(part) for part in more)
    return [head + b"$%d\r\n" % value_bytes, tail]


def _bulk(part: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(part), part)


def _place(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 6379}"


@contextmanager
def _unavailable() -> Iterator[None]:
    """Turn every failure of a call into :class:`TierUnavailable`, with a reason fit for a label."""
    try:
        yield
    except (TimeoutError, OSError) as error:
        raise TierUnavailable("timeout" if isinstance(error, TimeoutError) else "connection") from error
    except RedisError as error:
        raise TierUnavailable(_reason(error)) from error
    except RedisClusterException as error:  # no RedisError: no node answers, or none has the key's slot
        raise TierUnavailable("connection") from error


def _reason(error: RedisError) -> str:
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import OutOfMemoryError
    from redis.exceptions import TimeoutError as RedisTimeoutError

    if isinstance(error, RedisTimeoutError):
        return "timeout"
    if isinstance(error, RedisConnectionError):
        return "connection"
    return "full" if isinstance(error, OutOfMemoryError) else "refused"
