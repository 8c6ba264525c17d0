"""A ``headrace up`` of its own for tests that look at the system from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from infra.embedded import die_with_parent
from infra.model_prep import is_complete, model_dir
from infra.stack.engine_env import engine_python
from infra.stack.state import ProcessState, StackState, read_state, state_file

PAID_KEY = "sk-headrace-dev"
FREE_KEY = "sk-headrace-free"
ROLES = {"gateway", "moderation", "scheduler", "history", "worker", "edge", "batch-runner"}
PROJECT = Path(__file__).resolve().parent.parent


def headrace(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "infra.cli", *arguments]


def run_headrace(*arguments: str, seconds: float = 30.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        headrace(*arguments),
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
    )


def engine_problem() -> str | None:
    """Why the real engine cannot be tested here, with the command that changes that; None if it can."""
    if engine_python() is None:
        return "no engine environment: run make setup-engine"
    if not is_complete(model_dir()):
        return f"no model in {model_dir()}: run make model"
    return None


def eventually(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of ``condition``, asked until the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.05)
    return value


class StackProcess:
    """``headrace up`` on a data folder, as a context manager that leaves nothing running."""

    def __init__(self, data_dir: Path, *options: str, env: dict[str, str] | None = None) -> None:
        self.data_dir = data_dir
        self._options = options
        self._env = env or {}
        self._output = data_dir.parent / f"{data_dir.name}.up.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def status(self) -> dict[str, Any]:
        done = run_headrace("status", "--json", "--data-dir", str(self.data_dir))
        found: dict[str, Any] = json.loads(done.stdout) if done.stdout.strip() else {}
        return found or {"url": None, "ws_url": None, "ready": False, "roles": []}

    def state(self) -> StackState:
        """The supervisor's own view; costs nothing, so it is what waits look at."""
        found = read_state(state_file(self.data_dir))
        assert found is not None
        return found

    def process_state(self, name: str, index: int = 0) -> ProcessState:
        """One process in :meth:`state`."""
        return next(r for r in self.state().roles if (r.name, r.index) == (name, index))

    @property
    def url(self) -> str:
        return self.state().url

    @property
    def ws_url(self) -> str:
        return self.state().ws_url

    def start(self) -> StackProcess:
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                headrace("up", "--data-dir", str(self.data_dir), *self._options),
                cwd=PROJECT,
                env={**os.environ, **self._env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=die_with_parent,
            )
        return self

    def wait_ready(self, seconds: float = 60.0) -> None:
        """Wait until every role is ready; fails with what ``up`` said."""

        def ready() -> bool:
            assert self.running.poll() is None, f"headrace up ended:\n{self.output[-3000:]}"
            state = read_state(state_file(self.data_dir))
            return state is not None and state.ready and {r.name for r in state.roles} >= ROLES

        try:
            eventually(ready, seconds, "every role ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output[-3000:]}") from None

    def stop(self, sig: int = signal.SIGINT, seconds: float = 25.0) -> int:
        """Signal ``up`` and return its exit code."""
        if self.running.poll() is None:
            self.running.send_signal(sig)
        return self.running.wait(seconds)

    def __enter__(self) -> StackProcess:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.running.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.running.kill()
                self.running.wait(10)
