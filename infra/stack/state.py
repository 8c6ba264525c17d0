"""What a running stack writes about itself into its data folder, and how others read it.

``stack.json`` is replaced whole at every change. ``lock`` is held as long as ``headrace up`` lives, so a
file left behind by a killed one is never taken for a running stack.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..redis_facts import RedisFacts
from .errors import StackError
from .policy import RoleHealth

DATA_DIR_VARIABLE = "HEADRACE_DATA_DIR"
#: The configuration of a running stack, in its data folder.
SETTINGS_FILE = "settings.json"
#: Tells a role where the state of its stack is; only ``headrace up`` sets it.
STACK_FILE_VARIABLE = "HEADRACE_STACK_FILE"


class ProcessState(BaseModel):
    """One process of the stack.

    Attributes:
        kind: ``role`` has an ops port with ``/readyz``; ``service`` is the broker or Redis.
        pool: whose models a worker serves.
        pid: None while it is not running.
        port: ops port of a role, or the port a service listens on.
        restarts: how often it was started again, for whatever reason.
        reason: why it is not ready.
        last_exit: how the process before this one ended: its exit code (0: drained, as it was asked to), or
            the signal, negative; None if there was none, or while the first one still drains.
    """

    model_config = ConfigDict(extra="ignore")

    name: str
    index: int
    kind: Literal["role", "service"]
    pool: str | None = None
    pid: int | None = None
    port: int = 0
    ready: bool = False
    restarts: int = 0
    reason: str | None = "starting"
    last_exit: int | None = None
    log: str = ""

    @property
    def health(self) -> RoleHealth:
        """Its readiness alone."""
        return RoleHealth(self.name, self.index, self.ready, self.reason, self.pool)


class StackState(BaseModel):
    """The whole stack.

    Attributes:
        url: the page and the HTTP API.
        ws_url: the websocket.
        pid: the supervisor.
        reloads: how often it was asked to read its configuration again.
        config_error: why the last of these changed nothing.
        redis_facts: filled in by whoever asks its Redis, never in the file.
    """

    model_config = ConfigDict(extra="ignore")

    url: str
    ws_url: str
    pid: int
    engine: str
    kafka: str
    redis: str
    reloads: int = 0
    config_error: str | None = None
    roles: list[ProcessState] = Field(default_factory=list)
    redis_facts: RedisFacts | None = Field(default=None, exclude=True)

    @property
    def ready(self) -> bool:
        """Whether every process is ready."""
        return bool(self.roles) and all(r.ready for r in self.roles)


def default_data_dir() -> Path:
    """``HEADRACE_DATA_DIR``, else a folder in the user's home."""
    named = os.environ.get(DATA_DIR_VARIABLE)
    return Path(named) if named else Path.home() / ".local" / "share" / "headrace" / "dev"


def state_file(data_dir: Path) -> Path:
    """Where the state of a stack is."""
    return data_dir / "stack.json"


def write_json(path: Path, text: str) -> None:
    """Replace a file whole; readers see the old text or the new."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read_state(path: Path) -> StackState | None:
    """The state in a file; None if there is none or it is unreadable."""
    try:
        return StackState.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError):
        return None


@contextmanager
def data_dir_lock(data_dir: Path) -> Iterator[None]:
    """Hold the data folder for this process alone.

    Raises:
        StackError: another stack runs on it, or it cannot be written.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        handle = (data_dir / "lock").open("a+")
    except OSError as error:
        raise StackError(f"the data folder {data_dir} cannot be used: {error.strerror}") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            found = read_state(state_file(data_dir))
            who = f" (pid {found.pid})" if found else ""
            raise StackError(
                f"a stack already runs on {data_dir}{who}: give another --data-dir"
            ) from None
        yield


def state_to_call(data_dir: Path, option: str) -> StackState:
    """The state of the stack that runs on a data folder, for a command that may name another with ``option``.

    Raises:
        StackError: none runs.
    """
    state = running_state(data_dir)
    if state is None:
        raise StackError(f"no stack runs on {data_dir}: headrace up (or give {option})")
    return state


def running_state(data_dir: Path) -> StackState | None:
    """The state of the stack that runs on a data folder; None when none does."""
    try:
        handle = (data_dir / "lock").open("r+")
    except OSError:
        return None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return read_state(state_file(data_dir))
    return None
