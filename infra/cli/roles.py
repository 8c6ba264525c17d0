"""``headrace gateway|moderation|scheduler|history|worker|edge|batch-runner``: become the role's process."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..settings import load
from ..stack.units import ROLE_MODULES, worker_interpreter


def become_role(name: str, arguments: Sequence[str]) -> int:
    """Replace this process by the role's own; a vLLM worker's runs in the engine's environment."""
    python = sys.executable
    wants_help = bool({"-h", "--help"} & set(arguments))
    if name == "worker" and not wants_help and importlib.util.find_spec("vllm") is None:
        python = worker_interpreter(load(_config(arguments)))
    os.execv(python, [python, *ROLE_MODULES[name], *arguments])  # noqa: S606


def _config(arguments: Sequence[str]) -> Path | None:
    """The value of ``--config`` among a role's options."""
    for position, argument in enumerate(arguments):
        if argument == "--config" and position + 1 < len(arguments):
            return Path(arguments[position + 1])
        if argument.startswith("--config="):
            return Path(argument.partition("=")[2])
    return None
