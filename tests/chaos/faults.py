"""Hurting a stack: signals to its processes at moments the seed decides."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from infra.stack.state import ProcessState, StackState

ROLES = ("gateway", "edge", "moderation", "scheduler", "history", "worker", "batch-runner")
#: What is done, with its share. ``stop`` freezes the process and wakes it again.
_ACTIONS = {"kill": 4, "term": 3, "stop": 3}
#: Workers matter most: they are hit more often than the other roles.
_WEIGHTS = {"worker": 4, "redis": 0.7, "broker": 0.7}

#: Longest time a process is watched after a fault.
_RECOVERY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at: seconds after the start of the load.
        frozen_seconds: how long ``stop`` lasts; 0 for the others.
    """

    at: float
    target: str
    action: str
    frozen_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that was done.

    Attributes:
        clock: Unix seconds, to find it in the logs.
        began / ended: monotonic seconds; the same for a kill.
        others: other processes that were not ready at that moment.
    """

    fault: Fault
    index: int
    pid: int
    clock: float
    began: float
    ended: float
    others: tuple[str, ...]


def plan_faults(
    seed: int,
    count: int,
    seconds: float,
    targets: Sequence[str],
    actions: Sequence[str],
    frozen_seconds: tuple[float, float],
) -> list[Fault]:
    """``count`` faults spread over ``seconds``; the first moments are left to the load alone."""
    rng = random.Random(seed ^ 0xFA17)
    weights = [_WEIGHTS.get(t, 1.0) for t in targets]
    found = []
    for at in sorted(rng.uniform(min(2.0, seconds / 10), seconds) for _ in range(count)):
        target = rng.choices(targets, weights)[0]
        action = rng.choices(actions, [_ACTIONS[a] for a in actions])[0]
        if target in ("redis", "broker") and action == "term":
            action = "kill"
        frozen = round(rng.uniform(*frozen_seconds), 2) if action == "stop" else 0.0
        found.append(Fault(at, target, action, frozen))
    return found


class Injector:
    """Carries out faults on the stack that ``state`` describes.

    A target that is down already is waited for, for a while: a fault that hits nothing shows nothing. So is
    one that would leave fewer than ``spare`` processes of its name.
    """

    def __init__(self, state: Callable[[], StackState], seed: int, spare: int = 0) -> None:
        self._state = state
        self._spare = spare
        self._rng = random.Random(seed ^ 0x1A3)
        self._frozen: set[int] = set()
        self.done: list[Injected] = []
        self.missed: list[Fault] = []
        #: Longest time from a kill (or SIGTERM) of a process until it was ready again, by name.
        self.recovery_seconds: dict[str, float] = {}

    async def run(self, faults: Sequence[Fault]) -> None:
        """Inject all of them; frozen processes are awake again when this returns or is cancelled."""
        start = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for fault in faults:
                    await asyncio.sleep(max(0.0, start + fault.at - time.monotonic()))
                    group.create_task(self._inject(fault))
        finally:
            for pid in self._frozen:
                _signal(pid, signal.SIGCONT)

    async def _inject(self, fault: Fault) -> None:
        for _ in range(100):
            found = self._candidates(fault.target)
            if len(found) > self._spare:
                break
            await asyncio.sleep(0.1)
        else:
            self.missed.append(fault)
            return
        process = self._rng.choice(found)
        pid = process.pid
        assert pid is not None
        others = tuple(
            f"{r.name}-{r.index}" for r in self._state().roles if not r.ready and r.pid != pid
        )
        clock, began = time.time(), time.monotonic()
        match fault.action:
            case "kill":
                _signal(pid, signal.SIGKILL)
            case "term":
                _signal(pid, signal.SIGTERM)
            case _:
                self._frozen.add(pid)
                _signal(pid, signal.SIGSTOP)
                await asyncio.sleep(fault.frozen_seconds)
                _signal(pid, signal.SIGCONT)
                self._frozen.discard(pid)
        self.done.append(Injected(fault, process.index, pid, clock, began, time.monotonic(), others))
        if fault.action != "stop":
            await self._recovered(process, began)

    async def _recovered(self, process: ProcessState, began: float) -> None:
        """Wait until the process is there again; one that is hit again meanwhile counts from its last hit."""
        pid = process.pid
        while (took := time.monotonic() - began) < _RECOVERY_SECONDS:
            now = next(
                r for r in self._state().roles if (r.name, r.index) == (process.name, process.index)
            )
            if now.ready and now.pid != pid:
                break
            await asyncio.sleep(0.1)
        longest = self.recovery_seconds.get(process.name, 0.0)
        self.recovery_seconds[process.name] = max(longest, took)

    def _candidates(self, name: str) -> list[ProcessState]:
        return [
            r
            for r in self._state().roles
            if r.name == name and r.pid is not None and r.pid not in self._frozen and r.ready
        ]


def counts(done: Sequence[Injected]) -> Iterator[tuple[str, str, int]]:
    """(target, action, how often), in order."""
    table: dict[tuple[str, str], int] = {}
    for injected in done:
        key = injected.fault.target, injected.fault.action
        table[key] = table.get(key, 0) + 1
    for (target, action), number in sorted(table.items()):
        yield target, action, number


def _signal(pid: int, sig: signal.Signals) -> None:
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        return
