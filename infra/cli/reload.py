"""``headrace reload``: a running stack reads its configuration file again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import click

from ..stack.errors import StackError
from ..stack.state import running_state

_PATIENCE_SECONDS = 10.0
_LOOK_SECONDS = 0.05


def reload_stack(data_dir: Path) -> int:
    """Ask the supervisor to read the file again, and say what came of it.

    Raises:
        StackError: no stack runs, it does not answer, or the file changed nothing and why.
    """
    state = running_state(data_dir)
    if state is None:
        raise StackError(f"no stack runs on {data_dir}: headrace up")
    before = state.reloads
    os.kill(state.pid, signal.SIGHUP)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while state is not None and state.reloads == before:
        if time.monotonic() > deadline:
            raise StackError(f"the stack on {data_dir} (pid {state.pid}) does not answer")
        time.sleep(_LOOK_SECONDS)
        state = running_state(data_dir)
    if state is None:
        raise StackError("the stack has stopped")
    if state.config_error is not None:
        raise StackError(f"not reloaded, all stays as it was: {state.config_error}")
    click.echo("reloaded")
    return 0
