"""Keeps the processes of a stack running, and ends them in order."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from ..role import DRAINING
from .errors import StackError
from .policy import (
    SHORTEST_DRAIN_SECONDS,
    STACK_DRAIN_SECONDS,
    STUCK_SECONDS,
    GiveUp,
    after_exit,
    drain_phases,
)
from .process import Child, Watchdog, bound_log, last_words, set_aside, start_child
from .state import ProcessState, StackState, write_json
from .units import Unit

log = logging.getLogger(__name__)

_POLL_STARTING_SECONDS = 0.2
_POLL_READY_SECONDS = 1.0
#: For those whose successor starts as soon as they drain: so long nobody accepts connections.
_POLL_LISTENING_SECONDS = 0.25
_LOG_CHECK_SECONDS = 10.0


class Supervisor:
    """Runs units until told to drain; every change of their state goes to the state file and ``changed``.

    A role that somebody else asks to stop drains by its own grace time and is then started again. One that
    serves on a listening socket of ours has its successor while it still drains.
    """

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
        self._succeeded: dict[asyncio.Task[None], tuple[str, Child]] = {}
        self._listeners: list[socket.socket] = []
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
            if unit.listener is not None:
                self._listeners.append(unit.listener)
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
        """End all units in order, each phase within its time; then nothing of them runs.

        The listening sockets are closed first: nobody who comes now will be served.
        """
        self._stopping.set()
        for listener in self._listeners:
            listener.close()
        watchers = [*self._probes, *([self._log_bound] if self._log_bound else [])]
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        grace_ends = time.monotonic() + STACK_DRAIN_SECONDS
        for names, seconds in drain_phases(name for name, _ in self._keepers):
            grace = max(SHORTEST_DRAIN_SECONDS, grace_ends - time.monotonic())
            await self._end(names, grace, seconds)

    async def _end(self, names: Sequence[str], grace_seconds: float, seconds: float) -> None:
        """Ask the processes of these names to stop, ask again after the grace time, then kill them."""
        began = time.monotonic()
        children = self._running(names)
        ending = [task for (name, _), task in self._keepers.items() if name in names]
        ending += [task for task, (name, _) in self._succeeded.items() if name in names]
        for _, child in children:
            child.terminate()
        _, late = await asyncio.wait(ending, timeout=min(seconds, grace_seconds))
        if late:
            for _, child in children:
                child.terminate()
            _, late = await asyncio.wait(late, timeout=max(0.0, began + seconds - time.monotonic()))
        if late:
            self._kill(self._running(names))
            await asyncio.wait(late, timeout=2.0)

    def reload(self) -> None:
        """Have every role read its configuration again."""
        for role in self.state.roles:
            child = self._children.get((role.name, role.index))
            if role.kind == "role" and child is not None and child.running:
                child.reload()

    def note_reload(self, error: str | None) -> None:
        """A reload of the stack's configuration was asked for, and what kept it from being done."""
        self.state.reloads += 1
        self.state.config_error = error
        self._publish()

    def kill(self) -> None:
        """End everything now, also in the middle of a drain."""
        self._stopping.set()
        self._kill(self._running({name for name, _ in self._keepers}))

    def _running(self, names: Collection[str]) -> list[tuple[str, Child]]:
        found = [(name, child) for (name, _), child in self._children.items() if name in names]
        found += [(name, child) for name, child in self._succeeded.values() if name in names]
        return [(name, child) for name, child in found if child.running]

    def _kill(self, children: Sequence[tuple[str, Child]]) -> None:
        for name, child in children:
            log.warning("killed", extra={"role": name, "child_pid": child.pid})
            child.kill()

    async def _keep(self, unit: Unit, process: ProcessState) -> None:
        streak = 0
        log_file = Path(process.log)
        while not self._stopping.is_set():
            port = unit.pick_port()
            started = time.monotonic()
            fds = () if unit.listener is None else (unit.listener.fileno(),)
            try:
                child = await start_child(unit.command(port), log_file, self._watchdog, fds)
            except Exception as error:
                self._fail(StackError(f"{unit.name} cannot be started: {error}"))
                return
            self._children[unit.name, unit.index] = child
            if self._stopping.is_set():
                child.terminate()
            process.pid, process.port = child.pid, port
            self._set(process, ready=False, reason="starting")
            ended = asyncio.ensure_future(child.wait())
            if await self._has_drained_to_a_successor(unit, child, ended):
                seeing_off = asyncio.create_task(self._see_off(unit, process, child, ended))
                self._succeeded[seeing_off] = (unit.name, child)
                seeing_off.add_done_callback(self._succeeded.pop)
                process.restarts += 1
                continue
            code = await ended
            process.pid = None
            process.last_exit = code
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

    async def _has_drained_to_a_successor(
        self, unit: Unit, child: Child, ended: asyncio.Future[int]
    ) -> bool:
        """Wait until a process has ended (False), or drains and leaves its socket to a successor (True)."""
        drains = asyncio.ensure_future(child.draining.wait())
        waits: set[asyncio.Future[Any]] = {ended, drains}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        drains.cancel()
        if ended.done() or self._stopping.is_set():
            return False
        if unit.listener is not None:
            return True
        await self._until_drained(unit, child, ended)
        return False

    async def _until_drained(self, unit: Unit, child: Child, ended: asyncio.Future[int]) -> None:
        await asyncio.wait({ended}, timeout=unit.grace_seconds + STUCK_SECONDS)
        if not ended.done():
            self._kill([(unit.name, child)])
        await asyncio.wait({ended})

    async def _see_off(
        self, unit: Unit, process: ProcessState, child: Child, ended: asyncio.Future[int]
    ) -> None:
        """Wait for the end of a process that has a successor."""
        await self._until_drained(unit, child, ended)
        process.last_exit = ended.result()
        self._publish()

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
                child = self._children.get((unit.name, unit.index))
                if reason == DRAINING and child is not None and child.pid == pid:
                    child.draining.set()
            ready = _POLL_READY_SECONDS if unit.listener is None else _POLL_LISTENING_SECONDS
            await asyncio.sleep(ready if process.ready else _POLL_STARTING_SECONDS)

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
