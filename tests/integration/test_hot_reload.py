"""A running stack takes up what its configuration file says now, without a restart."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from infra.embedded import Command
from infra.settings import hash_key
from infra.stack.process import Watchdog, start_child
from tests.stack_process import PROJECT, StackProcess, eventually, headrace, run_headrace

OLD_KEY, NEW_KEY = "sk-old", "sk-new"
BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}


def write(file: Path, *, keys: tuple[str, ...], extra: str = "", partitions: int = 8) -> None:
    file.write_text(
        '[models.m]\npath = "builtin:sim"\n[tiers.paid]\nqueue_class = "interactive"\n'
        f'[worker]\nengine = "sim"\n[kafka]\npartitions = {partitions}\n'
        + "".join(
            f'[[keys]]\nid = "k"\nsha256 = "{hash_key(key)}"\ntenant = "t"\ntier = "paid"\n'
            for key in keys
        )
        + extra
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "headrace.toml"
    write(file, keys=(OLD_KEY,))
    return file


@pytest.fixture(scope="module")
def stack(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackProcess]:
    data_dir = tmp_path_factory.mktemp("reload") / "data"
    with StackProcess(data_dir, "--config", str(config)) as running:
        running.wait_ready(60)
        yield running


def reload(stack: StackProcess) -> subprocess.CompletedProcess[str]:
    return run_headrace("reload", "--data-dir", str(stack.data_dir))


def answers(stack: StackProcess, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(
        f"{stack.url}/v1/chat/completions", json=BODY, headers=headers, timeout=20
    ).status_code


def pids(stack: StackProcess) -> dict[str, int | None]:
    return {role.name: role.pid for role in stack.state().roles}


async def closed_with(socket: ClientConnection) -> int | None:
    try:
        while True:
            await socket.recv()
    except ConnectionClosed:
        return socket.close_code


async def test_a_new_key_works_and_a_revoked_one_does_not_on_open_sockets_either(
    stack: StackProcess, config: Path
) -> None:
    before = pids(stack)
    assert answers(stack, OLD_KEY) == 200
    headers = {"Authorization": f"Bearer {OLD_KEY}"}
    async with connect(stack.ws_url, additional_headers=headers) as socket:
        write(config, keys=(NEW_KEY,))
        done = reload(stack)
        assert (done.returncode, done.stdout) == (0, "reloaded\n"), done.stderr
        assert await closed_with(socket) == 1012
    eventually(lambda: answers(stack, NEW_KEY) == 200, 10, "the new key is known")
    eventually(lambda: answers(stack, OLD_KEY) == 401, 10, "the old key is not")
    assert pids(stack) == before


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"extra": "[http]\nprot = 1\n"}, "http.prot: is not a known key"),
        ({"extra": "no toml"}, "configuration"),
        ({"partitions": 9}, "kafka.partitions cannot change at run time"),
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing_and_the_status_says_so(
    stack: StackProcess, config: Path, broken: dict[str, object], said: str
) -> None:
    write(config, keys=(NEW_KEY,))
    assert reload(stack).returncode == 0
    write(config, keys=(OLD_KEY,), **broken)  # type: ignore[arg-type]
    done = reload(stack)
    assert done.returncode == 1
    assert said in done.stderr
    assert said in stack.status()["config_error"]
    shown = run_headrace("status", "--data-dir", str(stack.data_dir)).stdout
    assert "WARNING configuration not reloaded" in shown
    assert answers(stack, NEW_KEY) == 200
    assert answers(stack, OLD_KEY) == 401
    write(config, keys=(NEW_KEY,))
    assert reload(stack).returncode == 0
    assert stack.status()["config_error"] is None


def test_a_role_that_is_started_again_has_the_reloaded_configuration(
    stack: StackProcess, config: Path
) -> None:
    write(config, keys=(NEW_KEY, OLD_KEY))
    assert reload(stack).returncode == 0
    done = run_headrace("restart", "gateway", "--data-dir", str(stack.data_dir))
    assert done.returncode == 0, done.stderr
    assert answers(stack, OLD_KEY) == 200


def test_without_a_running_stack_it_says_so(data_dir: Path) -> None:
    done = run_headrace("reload", "--data-dir", str(data_dir))
    assert done.returncode == 1
    assert "no stack runs" in done.stderr


def test_a_role_alone_reads_its_file_again_and_says_what_keeps_it_from_that(
    stack: StackProcess, config: Path, tmp_path: Path
) -> None:
    file = tmp_path / "headrace.json"
    settings = json.loads((stack.data_dir / "settings.json").read_text())
    file.write_text(json.dumps(settings))
    with subprocess.Popen(
        headrace("history", "--config", str(file), "--ops-port", "0"),
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as role:
        assert role.stdout is not None
        try:
            _until(role.stdout, "ready")
            file.write_text(json.dumps(settings | {"drain_seconds": 1.5}))
            role.send_signal(signal.SIGHUP)
            assert "drain_seconds cannot change at run time" in _until(role.stdout, "not reloaded")
            file.write_text(json.dumps(settings | {"keys": []}))
            role.send_signal(signal.SIGHUP)
            _until(role.stdout, "configuration reloaded")
        finally:
            role.terminate()
            role.stdout.read()
        assert role.wait(20) == 0


def _until(lines: Iterator[str], word: str) -> str:
    """The first line with this word; the test's own timeout bounds it."""
    return next(line for line in lines if word in line)


_LATE = """
import pathlib, signal, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
signal.signal(signal.SIGHUP, lambda *_: sys.exit("reloaded"))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
"""


async def test_a_reload_that_comes_before_a_role_listens_is_neither_lost_nor_deadly(
    tmp_path: Path,
) -> None:
    watchdog, go, log = Watchdog(), tmp_path / "go", tmp_path / "log"
    child = await start_child(Command((sys.executable, "-c", _LATE, str(go))), log, watchdog)
    child.reload()
    go.touch()
    assert await child.wait() == 1
    assert log.read_text() == "reloaded\n"
    watchdog.close()


_CHILD = """
import signal, sys
from infra.terminal import Terminal
terminal = Terminal()
signal.signal(signal.SIGHUP, lambda *_: (print(terminal.is_gone(), file=open(sys.argv[1], "a")), sys.exit()))
signal.signal(signal.SIGUSR1, lambda *_: print(terminal.is_gone(), file=open(sys.argv[1], "a")))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_a_closed_terminal_is_told_from_a_reload(tmp_path: Path) -> None:
    """Both come as SIGHUP, and a foreground process that outlived its terminal could not be stopped."""
    found = tmp_path / "found"
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(PROJECT)
        os.execv(sys.executable, [sys.executable, "-c", _CHILD, str(found)])
    assert b"ready" in os.read(terminal, 1_024)
    os.kill(pid, signal.SIGUSR1)
    eventually(lambda: found.exists() and found.read_text() == "False\n", 10, "the terminal is there")
    os.close(terminal)
    eventually(lambda: found.read_text() == "False\nTrue\n", 10, "the terminal is gone")
    os.waitpid(pid, 0)
