"""The edge as a process: ready when its services are, drained by SIGTERM."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
from websockets.asyncio.client import connect as ws_connect

from infra.embedded import die_with_parent, free_port
from infra.settings import Settings
from streaming_edge.close_codes import CloseCase
from tests.edge_kit import eventually


async def test_the_process_gets_ready_and_sigterm_sends_clients_elsewhere_q1(
    settings: Callable[..., Settings], tmp_path: Path
) -> None:
    port, ops = free_port(), free_port()
    config = tmp_path / "headrace.json"
    config.write_text(settings(edge={"port": port}).model_dump_json())
    command = [sys.executable, "-m", "streaming_edge", "--config", str(config), "--ops-port", str(ops)]
    with (tmp_path / "edge.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent)  # noqa: ASYNC220

    def ready() -> bool:
        assert process.poll() is None, (tmp_path / "edge.log").read_text()
        try:
            return httpx.get(f"http://127.0.0.1:{ops}/readyz", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        await eventually(ready, 30)
        async with ws_connect(f"ws://127.0.0.1:{port}/v1/ws") as connection:
            await connection.send(json.dumps({"type": "auth", "api_key": "sk-headrace-dev"}))
            await connection.send(json.dumps({"type": "ping"}))
            assert json.loads(await connection.recv()) == {"type": "pong"}
            process.send_signal(signal.SIGTERM)
            await connection.wait_closed()
            assert connection.close_code == CloseCase.RESTART.value.code
        assert process.wait(10) == 0
        assert "sk-headrace" not in (tmp_path / "edge.log").read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
