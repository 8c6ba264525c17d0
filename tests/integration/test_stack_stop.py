"""Stopping a whole stack, or one of its processes, while readers wait (Q2 Q5)."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect

from infra.embedded import die_with_parent, free_port
from infra.settings import Settings, development
from infra.stack.policy import STACK_DRAIN_SECONDS
from infra.stack.state import read_state, state_file
from tests.edge_kit import eventually
from tests.stack_process import PAID_KEY, PROJECT, StackProcess, run_headrace

_BODY = {"model": "default", "messages": [{"role": "user", "content": "x"}]}


async def test_q2_an_interrupt_with_idle_readers_does_not_wait_for_the_roles_own_grace_times(
    data_dir: Path, tmp_path: Path
) -> None:
    """Replies without a token yet: the stream's last event and the close code say where to go on."""
    raw = development("sim").model_dump(mode="json")
    raw["drain_seconds"] = raw["worker"]["drain_seconds"] = 60
    config = tmp_path / "headrace.json"
    config.write_text(json.dumps(raw))
    with StackProcess(data_dir, "--config", str(config), "--sim-ttft-ms", "60000") as stack:
        await asyncio.to_thread(stack.wait_ready)
        headers = {"Authorization": f"Bearer {PAID_KEY}"}
        async with (
            httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=30) as http,
            http.stream("POST", "/v1/chat/completions", json=_BODY | {"stream": True}) as events,
            connect(stack.ws_url, additional_headers=headers) as reading,
            connect(stack.ws_url, additional_headers=headers),
        ):
            assert events.status_code == 200
            await reading.send(json.dumps({"type": "chat.create", "ref": 1, "body": _BODY}))
            while json.loads(await reading.recv()).get("status") != "started":
                pass
            stack.running.send_signal(signal.SIGINT)
            code = await asyncio.to_thread(stack.running.wait, STACK_DRAIN_SECONDS + 20)
            text = (await events.aread()).decode()
            await reading.wait_closed()
            assert reading.close_code == 1012
        assert code == 0
        assert "stream=true&after=1-0" in text.rstrip().rpartition("\n\n")[2]
        state = read_state(state_file(data_dir))
        assert state is not None
        ends = {(p.name, p.index): p.last_exit for p in state.roles if p.kind == "role"}
        assert set(ends.values()) == {0}, ends


def test_headrace_restart_restarts_the_roles_it_is_given(sim_stack: StackProcess) -> None:
    before = {p.name: p.pid for p in sim_stack.state().roles}
    done = run_headrace("restart", "edge", "--data-dir", str(sim_stack.data_dir))
    assert (done.returncode, done.stdout.split(":")[0]) == (0, "edge 0"), done.stderr
    after = {p.name: p.pid for p in sim_stack.state().roles}
    assert {name for name in before if before[name] != after[name]} == {"edge"}
    assert run_headrace("restart", "nobody", "--data-dir", str(sim_stack.data_dir)).returncode == 2


async def test_a_killed_edge_refuses_no_connection(sim_stack: StackProcess) -> None:
    pid = sim_stack.process_state("edge").pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with connect(sim_stack.ws_url, open_timeout=20) as connection:
        await connection.send(json.dumps({"type": "ping"}))
        assert json.loads(await connection.recv()) == {"type": "pong"}
    assert sim_stack.process_state("edge").pid != pid


@pytest.mark.parametrize("wrapper", ["", "exec ", "true && exec "])
async def test_q5_a_role_under_a_shell_drains_on_sigterm(
    settings: Callable[..., Settings], tmp_path: Path, wrapper: str
) -> None:
    """As a container starts it: first process of a session of its own, perhaps through ``sh -c``."""
    port, ops = free_port(), free_port()
    config = tmp_path / "headrace.json"
    config.write_text(settings(edge={"port": port}).model_dump_json())
    role = [sys.executable, "-m", "streaming_edge", "--config", str(config), "--ops-port", str(ops)]
    command = ["sh", "-c", wrapper + shlex.join(role)] if wrapper else role
    with (tmp_path / "edge.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220
            command,
            cwd=PROJECT,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )

    def ready() -> bool:
        assert process.poll() is None, (tmp_path / "edge.log").read_text()
        try:
            return httpx.get(f"http://127.0.0.1:{ops}/readyz", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        await eventually(ready, 30)
        async with connect(f"ws://127.0.0.1:{port}/v1/ws") as connection:
            process.send_signal(signal.SIGTERM)
            await connection.wait_closed()
            assert connection.close_code == 1012
        assert await asyncio.to_thread(process.wait, 10) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
