"""The processes of a stack: how each is started, and how to tell that it is ready."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aiohttp

from ..embedded import (
    LOOPBACK,
    Command,
    broker_answers,
    broker_command,
    cache_command,
    free_port,
    redis_answers,
    redis_command,
)
from ..settings import Settings
from .engine_env import ENGINE_PYTHON_VARIABLE, engine_python
from .errors import StackError
from .policy import CACHE
from .state import STACK_FILE_VARIABLE, ProcessState

#: Arguments of the interpreter that make each role; the folder a user happens to be in is no part of the
#: path (-P), so that nothing there is taken for a role.
ROLE_MODULES: dict[str, tuple[str, ...]] = {
    "gateway": ("-P", "-m", "producers"),
    "edge": ("-P", "-m", "streaming_edge"),
    "moderation": ("-P", "-m", "stages", "moderation"),
    "scheduler": ("-P", "-m", "stages", "scheduler"),
    "history": ("-P", "-m", "stages", "history"),
    "worker": ("-P", "-m", "workers"),
    "batch-runner": ("-P", "-m", "producers.batch"),
}

#: Why a process is not ready, or None.
Probe = Callable[[int], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class Unit:
    """One process to keep running.

    Attributes:
        port: its fixed port; None = a free one for each start (ops ports).
        command: what to start, given the port.
        probe: why it is not ready, given the port; None when it is. Bounded by itself.
        on_answer: to be done each time it has been started and answers, before it counts as ready.
        listener: the listening socket it serves on; it belongs to the supervisor, so it refuses nobody while
            the process is restarted, and a successor can be started while the process still drains.
        grace_seconds: how long it takes to drain at most, if it is left to itself.
        pool: whose models a worker serves; None for everything else.
    """

    name: str
    index: int
    kind: Literal["role", "service"]
    port: int | None
    command: Callable[[int], Command]
    probe: Probe
    on_answer: Callable[[], Awaitable[object]] | None = None
    listener: socket.socket | None = None
    grace_seconds: float = 0.0
    pool: str | None = None

    def pick_port(self) -> int:
        """The port of its next start."""
        return self.port if self.port is not None else free_port()

    def state(self, logs: Path) -> ProcessState:
        """Its state before its first start."""
        log = str(logs / f"{self.name}-{self.index}.log")
        return ProcessState(name=self.name, index=self.index, kind=self.kind, pool=self.pool, log=log)


def broker_unit(port: int, data_dir: Path, on_answer: Callable[[], Awaitable[object]]) -> Unit:
    """The embedded broker."""

    async def probe(port: int) -> str | None:
        return None if await asyncio.to_thread(broker_answers, LOOPBACK, port) else "does not answer"

    scratch = data_dir / "bin"
    return Unit("broker", 0, "service", port, lambda p: broker_command(p, scratch), probe, on_answer)


def redis_unit(port: int, data_dir: Path) -> Unit:
    """The embedded Redis."""
    return Unit("redis", 0, "service", port, lambda p: redis_command(p, data_dir / "redis"), _answers)


def cache_unit(port: int, memory_mib: int) -> Unit:
    """The embedded Redis of the KV tier."""
    return Unit(CACHE, 0, "service", port, lambda p: cache_command(p, memory_mib), _answers)


async def _answers(port: int) -> str | None:
    """Probe of a Redis."""
    return None if await asyncio.to_thread(redis_answers, LOOPBACK, port) else "does not answer"


def role_units(
    settings: Settings,
    settings_file: Path,
    state_file: Path,
    workers: int,
    http: aiohttp.ClientSession,
    listeners: Mapping[str, socket.socket],
) -> list[Unit]:
    """Every role, with ``workers`` workers of each pool; their indices go on from one pool to the next.

    Args:
        listeners: the listening sockets of the roles that have a port, by their names.

    Raises:
        StackError: the engine's environment is missing.
    """
    worker_python = worker_interpreter(settings)
    env = {
        STACK_FILE_VARIABLE: str(state_file),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }

    async def probe(port: int) -> str | None:
        return (await role_reason(http, port))[1]

    def unit(name: str, index: int, pool: str | None = None) -> Unit:
        python = worker_python if name == "worker" else sys.executable
        grace = settings.worker.drain_seconds if name == "worker" else settings.drain_seconds
        listener = listeners.get(name)

        def command(port: int) -> Command:
            options = ["--config", str(settings_file), "--index", str(index), "--ops-port", str(port)]
            if listener is not None:
                options += ["--listen-fd", str(listener.fileno())]
            if pool is not None:
                options += ["--pool", pool]
            return Command((python, *ROLE_MODULES[name], *options), env)

        return Unit(
            name, index, "role", None, command, probe, listener=listener, grace_seconds=grace, pool=pool
        )

    # The slowest to come up first.
    return [
        *(
            unit("worker", workers * number + index, pool)
            for number, pool in enumerate(settings.pools)
            for index in range(workers)
        ),
        *(
            unit(name, 0)
            for name in ("moderation", "scheduler", "history", "batch-runner", "gateway", "edge")
        ),
    ]


def worker_interpreter(settings: Settings) -> str:
    """The interpreter a worker of this engine runs in.

    Raises:
        StackError: vLLM is wanted and has no environment here.
    """
    if settings.worker.engine != "vllm":
        return sys.executable
    python = engine_python()
    if python is None:
        raise StackError(
            f"there is no engine environment: run make setup-engine (or name one in {ENGINE_PYTHON_VARIABLE})"
        )
    return str(python)


async def role_reason(http: aiohttp.ClientSession, port: int) -> tuple[bool, str | None]:
    """Ask a role's ``/readyz``: whether it answered, and why it is not ready."""
    try:
        timeout = aiohttp.ClientTimeout(total=2.0)
        async with http.get(f"http://{LOOPBACK}:{port}/readyz", timeout=timeout) as response:
            facts = await response.json()
            reason = facts.get("reason")
            return True, None if response.status == 200 else str(reason or "not ready")
    except (aiohttp.ClientError, TimeoutError, ValueError, OSError):
        return False, "does not answer yet"
