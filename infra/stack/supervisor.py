"""Keeps the processes of a stack running, and ends them in order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import StackError
from .policy import GiveUp, after_exit, drain_phases
from .process import Child, Watchdog, bound_log, last_words, set_aside, start_child
from .state import ProcessState, StackState, write_json
from .units import Unit

log = logging.getLogger(__name__)

_POLL_STARTING_SECONDS = 0.2
_POLL_READY_SECONDS = 1.0
_LOG_CHECK_SECONDS = 10.0


class Supervisor:
    """Runs units until told to drain; every change of their state goes to the state file and ``changed``."""

    def __init__(
        self,
        state: StackState,
        state_file: Path,
        logs: Path,
        watchdog: Watchdog,
        changed: Callable[[StackState], None],
    ) -> None:
        self.state = state
        self.failure: asyncio.Future[StackError] = asyncio.get_running_loop().create_future()
        self._state_file = state_file
        self._logs = logs
        self._watchdog = watchdog
        self._changed = changed
        self._stopping = asyncio.Event()
        self._children: dict[tuple[str, int], Child] = {}
        self._keepers: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._probes: list[asyncio.Task[None]] = []
        self._log_bound: asyncio.Task[None] | None = None
        self._change = asyncio.Event()

    def start(self, units: Sequence[Unit]) -> None:
        """Start units, all at once."""
        self._write()
        for unit in units:
            process = unit.state(self._logs)
            self.state.roles.append(process)
            set_aside(Path(process.log))
            key = (unit.name, unit.index)
            self._keepers[key] = asyncio.create_task(self._keep(unit, process))
            self._probes.append(asyncio.create_task(self._watch(unit, process)))
        if self._log_bound is None:
            self._log_bound = asyncio.create_task(self._bound_logs())
        self._publish()

    async def wait_ready(self, names: Sequence[str] | None = None) -> None:
        """Wait until these units (all, if None) are ready; no deadline of its own."""
        while not all(r.ready for r in self.state.roles if names is None or r.name in names):
            await self._change.wait()

    async def drain(self) -> None:
        """End all units in order, each phase within its grace; then nothing of them runs."""
        self._stopping.set()
        watchers = [*self._probes, *([self._log_bound] if self._log_bound else [])]
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        for names, grace in drain_phases(name for name, _ in self._keepers):
            keys = [key for key in self._keepers if key[0] in names]
            for key in keys:
                if key in self._children:
                    self._children[key].terminate()
            _, late = await asyncio.wait([self._keepers[k] for k in keys], timeout=grace)
            if late:
                for key in keys:
                    self._kill(key)
                await asyncio.wait(late, timeout=2.0)

    def kill(self) -> None:
        """End everything now, also in the middle of a drain."""
        self._stopping.set()
        for key in self._keepers:
            self._kill(key)

    def _kill(self, key: tuple[str, int]) -> None:
        child = self._children.get(key)
        if child is not None and child.running:
            log.warning("killed", extra={"role": key[0], "index": key[1]})
            child.kill()

    async def _keep(self, unit: Unit, process: ProcessState) -> None:
        streak = 0
        log_file = Path(process.log)
        while not self._stopping.is_set():
            port = unit.pick_port()
            started = time.monotonic()
            try:
                child = await start_child(unit.command(port), log_file, self._watchdog)
            except Exception as error:
                self._fail(StackError(f"{unit.name} cannot be started: {error}"))
                return
            self._children[unit.name, unit.index] = child
            if self._stopping.is_set():
                child.terminate()
            process.pid, process.port = child.pid, port
            self._set(process, ready=False, reason="starting")
            code = await child.wait()
            process.pid = None
            if self._stopping.is_set():
                self._set(process, ready=False, reason="stopped")
                return
            said = last_words(log_file)
            decision = after_exit(code, time.monotonic() - started, streak)
            if isinstance(decision, GiveUp):
                self._set(process, ready=False, reason=said)
                self._fail(StackError(said or f"{unit.name} ended with {code}", code))
                return
            streak = decision.streak
            process.restarts += 1
            why = f"ended with {code}" if code >= 0 else f"killed by signal {-code}"
            self._set(process, ready=False, reason=f"{why}, restarting" + (f": {said}" if said else ""))
            log.warning("restarting", extra={"role": unit.name, "index": unit.index, "exit_code": code})
            await self._pause(decision.after_seconds)

    async def _watch(self, unit: Unit, process: ProcessState) -> None:
        """Follow a unit's readiness."""
        answered_pid: int | None = None
        while True:
            pid = process.pid
            if pid is not None:
                reason = await unit.probe(process.port)
                if reason is None and unit.on_answer is not None and answered_pid != pid:
                    try:
                        await unit.on_answer()
                        answered_pid = pid
                    except Exception as error:
                        reason = str(error) or type(error).__name__
                if process.pid == pid and (reason is None, reason) != (process.ready, process.reason):
                    self._set(process, ready=reason is None, reason=reason)
            await asyncio.sleep(_POLL_READY_SECONDS if process.ready else _POLL_STARTING_SECONDS)

    async def _bound_logs(self) -> None:
        while True:
            await asyncio.sleep(_LOG_CHECK_SECONDS)
            for process in self.state.roles:
                await asyncio.to_thread(bound_log, Path(process.log))

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return

    def _fail(self, error: StackError) -> None:
        if not self.failure.done():
            self.failure.set_result(error)

    def _set(self, process: ProcessState, *, ready: bool, reason: str | None) -> None:
        process.ready, process.reason = ready, reason
        self._publish()

    def _publish(self) -> None:
        self._write()
        self._changed(self.state)
        self._change.set()
        self._change = asyncio.Event()

    def _write(self) -> None:
        write_json(self._state_file, self.state.model_dump_json(indent=1))
