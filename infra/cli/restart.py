"""``headrace restart``: a rolling restart of a running stack's roles."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import click

from ..stack.display import state_word
from ..stack.errors import StackError
from ..stack.state import ProcessState, running_state

#: Drain, start (vLLM may compile) and readiness of one process.
_PATIENCE_SECONDS = 300.0
_LOOK_SECONDS = 0.1


def restart_roles(data_dir: Path, roles: Sequence[str]) -> int:
    """Ask each process of these roles (all, if none is named) to stop; its supervisor starts it again.

    Raises:
        StackError: no stack runs, or a process does not come back.
    """
    state = running_state(data_dir)
    if state is None:
        raise StackError(f"no stack runs on {data_dir}: headrace up")
    chosen = [p for p in state.roles if p.kind == "role" and (not roles or p.name in roles)]
    for process in chosen:
        began = time.monotonic()
        _restart(data_dir, process)
        click.echo(f"{process.name} {process.index}: restarted in {time.monotonic() - began:.1f} s")
    return 0


def _restart(data_dir: Path, process: ProcessState) -> None:
    who = f"{process.name} {process.index}"
    old_pid = _look(data_dir, process).pid
    if old_pid is None:
        raise StackError(f"{who} does not run: see headrace status")
    os.kill(old_pid, signal.SIGTERM)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        now = _look(data_dir, process)
        if now.ready and now.pid not in (None, old_pid):
            return
        if time.monotonic() > deadline:
            raise StackError(f"{who} has not come back: {state_word(now)}")
        time.sleep(_LOOK_SECONDS)


def _look(data_dir: Path, process: ProcessState) -> ProcessState:
    state = running_state(data_dir)
    if state is None:
        raise StackError("the stack has stopped")
    return next(p for p in state.roles if (p.name, p.index) == (process.name, process.index))
