"""Runs a module of checks in the engine environment, which has vLLM and no pytest."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from infra.stack.engine_env import engine_python

PROJECT = Path(__file__).resolve().parents[2]


def run_in_engine(module: str, *arguments: str, seconds: float) -> dict[str, str | None]:
    """What has become of each check: None, or a traceback. The module prints it as its last line."""
    run = subprocess.run(
        [str(engine_python()), "-m", module, *arguments],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
    )
    assert run.returncode == 0, run.stderr[-2_000:]
    results: dict[str, str | None] = json.loads(run.stdout.splitlines()[-1])
    return results
