"""The supervisor with small programs in the place of roles."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from infra.embedded import Command
from infra.listeners import bind_listener
from infra.role import EXIT_CONFIGURATION
from infra.stack.process import Watchdog
from infra.stack.state import StackState, read_state, state_file
from infra.stack.supervisor import Supervisor
from infra.stack.units import Unit

SLEEP = "import time; time.sleep(60)"
STUBBORN = (
    f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); {SLEEP}"
)
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{SLEEP}']); {SLEEP}"


async def _ready(_: int) -> str | None:
    return None


def _unit(name: str, code: str, probe: Callable[[int], Awaitable[str | None]] = _ready) -> Unit:
    return Unit(name, 0, "role", None, lambda _: Command((sys.executable, "-c", code)), probe)


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    state = StackState(url="u", ws_url="w", pid=1, engine="sim", kafka="k", redis="r")
    watchdog = Watchdog()
    made = Supervisor(state, state_file(tmp_path), tmp_path / "logs", watchdog, lambda _: None)
    yield made
    made.kill()
    await asyncio.wait_for(made.drain(), 20)
    watchdog.close()


async def _until(condition: Callable[[], object], seconds: float = 15.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def _pid(supervisor: Supervisor, position: int = 0) -> int:
    pid = supervisor.state.roles[position].pid
    assert pid is not None
    return pid


async def test_a_process_that_dies_is_started_again(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start([_unit("edge", SLEEP)])
    await asyncio.wait_for(supervisor.wait_ready(), 10)
    first = _pid(supervisor)
    psutil.Process(first).kill()
    await _until(lambda: supervisor.state.roles[0].restarts == 1 and supervisor.state.roles[0].ready)
    assert _pid(supervisor) != first
    assert read_state(state_file(tmp_path)) == supervisor.state


async def test_a_process_that_keeps_dying_says_why(supervisor: Supervisor) -> None:
    supervisor.start([_unit("edge", "import sys; sys.exit('no luck')")])
    await _until(lambda: supervisor.state.roles[0].restarts >= 2)
    await _until(lambda: supervisor.state.roles[0].reason == "ended with 1, restarting: no luck")


async def test_a_configuration_error_ends_it_all_with_its_message(supervisor: Supervisor) -> None:
    code = f"import sys; sys.stderr.write('headrace edge: bad key\\n'); sys.exit({EXIT_CONFIGURATION})"
    supervisor.start([_unit("edge", code)])
    error = await asyncio.wait_for(supervisor.failure, 10)
    assert (str(error), error.exit_code) == ("headrace edge: bad key", EXIT_CONFIGURATION)


async def test_a_program_that_cannot_be_started_is_a_failure(supervisor: Supervisor) -> None:
    supervisor.start([Unit("edge", 0, "role", None, lambda _: Command(("/nowhere/x",)), _ready)])
    error = await asyncio.wait_for(supervisor.failure, 10)
    assert "edge cannot be started" in str(error)


async def test_what_a_dead_process_started_is_ended_too(supervisor: Supervisor) -> None:
    supervisor.start([_unit("worker", PARENT)])
    await _until(lambda: supervisor.state.roles[0].pid and psutil.Process(_pid(supervisor)).children())
    parent = psutil.Process(_pid(supervisor))
    (grandchild,) = parent.children()
    parent.kill()
    await _until(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)


async def test_drain_ends_processes_in_order_and_kills_what_does_not_go(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    ended: list[str] = []
    supervisor._changed = lambda state: ended.extend(
        r.name for r in state.roles if r.reason == "stopped" and r.name not in ended
    )
    units = [_unit("broker", STUBBORN), _unit("worker", SLEEP), _unit("edge", SLEEP)]
    supervisor.start(units)
    await asyncio.wait_for(supervisor.wait_ready(), 10)
    await _until(lambda: "on" in (tmp_path / "logs" / "broker-0.log").read_text())
    pids = [_pid(supervisor, position) for position in range(3)]
    await asyncio.wait_for(supervisor.drain(), 15)
    assert ended == ["edge", "worker", "broker"]
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_readiness_waits_for_what_is_to_be_done_after_each_start(supervisor: Supervisor) -> None:
    calls: list[int] = []

    async def on_answer() -> None:
        calls.append(_pid(supervisor))
        if len(calls) == 1:
            raise RuntimeError("not yet")

    command = Command((sys.executable, "-c", SLEEP))
    supervisor.start([Unit("broker", 0, "service", 1, lambda _: command, _ready, on_answer)])
    await asyncio.wait_for(supervisor.wait_ready(), 10)
    assert len(calls) == 2
    psutil.Process(_pid(supervisor)).kill()
    await _until(lambda: len(calls) == 3)
    assert len(set(calls)) == 2


#: Takes its time to drain after SIGTERM, until the file ``go`` is there.
DRAINS = """
import os, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: (asked.append(1), open(f"drains-{os.getpid()}", "w").close()))
open(f"up-{os.getpid()}", "w").close()
while not (asked and os.path.exists("go")):
    time.sleep(0.02)
"""


def _draining_unit(supervisor: Supervisor, tmp_path: Path, listener: socket.socket | None) -> Unit:
    code = f"import os; os.chdir({str(tmp_path)!r})\n{DRAINS}"

    async def probe(_: int) -> str | None:
        pid = _pid(supervisor)
        if (tmp_path / f"drains-{pid}").exists():
            return "draining"
        return None if (tmp_path / f"up-{pid}").exists() else "does not answer yet"

    command = Command((sys.executable, "-c", code))
    return Unit("edge", 0, "role", None, lambda _: command, probe, listener=listener, grace_seconds=60)


async def test_a_role_on_a_socket_of_ours_has_its_successor_while_it_drains(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    with bind_listener("127.0.0.1", 0) as listener:
        supervisor.start([_draining_unit(supervisor, tmp_path, listener)])
        await asyncio.wait_for(supervisor.wait_ready(), 10)
        first = psutil.Process(_pid(supervisor))
        await _until(lambda: (tmp_path / f"up-{first.pid}").exists())
        first.terminate()
        await _until(lambda: supervisor.state.roles[0].pid != first.pid)
        await _until(lambda: supervisor.state.roles[0].ready)
        assert first.is_running()
        assert supervisor.state.roles[0].last_exit is None
        (tmp_path / "go").touch()
        await _until(lambda: supervisor.state.roles[0].last_exit == 0)
        assert supervisor.state.roles[0].restarts == 1


async def test_any_other_role_is_started_again_when_it_has_drained(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor.start([_draining_unit(supervisor, tmp_path, None)])
    await asyncio.wait_for(supervisor.wait_ready(), 10)
    first = psutil.Process(_pid(supervisor))
    await _until(lambda: (tmp_path / f"up-{first.pid}").exists())
    first.terminate()
    await _until(lambda: supervisor.state.roles[0].reason == "draining")
    assert _pid(supervisor) == first.pid
    (tmp_path / "go").touch()
    await _until(lambda: supervisor.state.roles[0].restarts == 1)
    assert supervisor.state.roles[0].last_exit == 0
