"""``headrace status``: what a running stack's processes say of themselves, asked now."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import click

from contracts.token_stream import StreamsUnavailable

from ..embedded import LOOPBACK, broker_answers, redis_answers
from ..redis_facts import RedisFacts, read_facts
from ..settings import SettingsError, load
from ..stack.display import state_word
from ..stack.state import SETTINGS_FILE, ProcessState, StackState, running_state
from ..stack.units import role_reason

_STOP_SECONDS = 20.0
_REDIS_SECONDS = 2.0


def show_status(data_dir: Path, *, as_json: bool) -> int:
    """Print the state of the stack on a data folder; returns 1 when none runs there."""
    state = running_state(data_dir)
    if state is not None:
        asyncio.run(_ask_all(state.roles))
        state.redis_facts = asyncio.run(_redis_facts(data_dir))
    if as_json:
        click.echo(json.dumps(status_facts(state), indent=1))
    elif state is None:
        click.echo(f"no stack runs on {data_dir}: headrace up", err=True)
    else:
        _print_table(state)
    return 0 if state is not None else 1


def status_facts(state: StackState | None) -> dict[str, Any]:
    """The object ``headrace status --json`` prints."""
    if state is None:
        nothing = dict.fromkeys(("url", "ws_url", "config_error", "redis"))
        return {**nothing, "ready": False, "roles": []}
    return {
        "url": state.url,
        "ws_url": state.ws_url,
        "ready": state.ready,
        "config_error": state.config_error,
        "redis": state.redis_facts.model_dump() if state.redis_facts is not None else None,
        "roles": [role.model_dump() for role in state.roles],
    }


def stop_stack(data_dir: Path) -> int:
    """Have the stack on a data folder drain, and wait until it has; returns 1 when that takes too long."""
    state = running_state(data_dir)
    if state is None:
        click.echo(f"no stack runs on {data_dir}")
        return 0
    os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while running_state(data_dir) is not None:
        if time.monotonic() > deadline:
            click.echo(f"the stack on {data_dir} (pid {state.pid}) does not stop", err=True)
            return 1
        time.sleep(0.1)
    click.echo("stopped")
    return 0


async def _ask_all(roles: Sequence[ProcessState]) -> None:
    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(_ask(http, role) for role in roles if role.pid is not None))


async def _ask(http: aiohttp.ClientSession, role: ProcessState) -> None:
    """Bring a process's state up to date; the supervisor's own view may be a second old."""
    if role.kind == "role":
        answered, reason = await role_reason(http, role.port)
        if answered or role.ready:
            role.ready, role.reason = reason is None, reason
        return
    answers = broker_answers if role.name == "broker" else redis_answers
    if not await asyncio.to_thread(answers, LOOPBACK, role.port):
        role.ready, role.reason = False, "does not answer"


async def _redis_facts(data_dir: Path) -> RedisFacts | None:
    """What the stack's Redis says of itself; None when it does not answer."""
    try:
        # The state file names it without its password.
        settings = load(data_dir / SETTINGS_FILE)
        async with asyncio.timeout(_REDIS_SECONDS):
            return await read_facts(settings.redis)
    except (SettingsError, StreamsUnavailable, TimeoutError):
        return None


def _redis_line(facts: RedisFacts) -> str:
    used, limit = facts.used_bytes, facts.maxmemory_bytes
    memory = "memory unknown" if used is None else f"{used / 1e6:.1f} MB used"
    if limit:
        memory += f" of {limit / 1e6:.1f} MB"
    aof = {True: "append-only file", False: "no append-only file", None: "append-only file unknown"}
    return f"redis: {facts.policy}, {memory}, {aof[facts.aof]}"


def _print_table(state: StackState) -> None:
    for role in state.roles:
        index = f"{role.index} {role.pool}" if role.pool else ""
        restarts = f"{role.restarts} restarts" if role.restarts else ""
        name = f"{role.name} {index}".strip()
        click.echo(f"{name:<18} {role.pid or '-':<8} {state_word(role)}  {restarts}".rstrip())
    if state.redis_facts is not None:
        click.echo(_redis_line(state.redis_facts))
        if state.redis_facts.warning is not None:
            click.echo(f"WARNING {state.redis_facts.warning}")
    if state.config_error is not None:
        click.echo(f"WARNING configuration not reloaded: {state.config_error}")
    click.echo(f"page {state.url}   websocket {state.ws_url}")
