"""A background response outlives its client, its gateway, the edge and its worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from infra.settings import DEV_PAID_KEY
from tests.stack_process import StackProcess, eventually

TOKENS = 120


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[StackProcess]:
    options = ("--engine", "sim", "--workers", "2", "--sim-ttft-ms", "1", "--sim-tpot-ms", "30")
    with StackProcess(tmp_path / "data", *options) as running:
        running.wait_ready(90)
        yield running


def kill(stack: StackProcess, role: str, index: int = 0) -> None:
    """``kill -9``, and the next one is ready."""
    old = next(r for r in stack.state().roles if (r.name, r.index) == (role, index))
    assert old.pid is not None
    os.kill(old.pid, signal.SIGKILL)

    def back() -> bool:
        new = next(r for r in stack.state().roles if (r.name, r.index) == (role, index))
        return new.ready and new.pid != old.pid

    eventually(back, 30, f"{role} is back")


def test_the_client_s_own_resume_gives_the_stored_text_whatever_died_I1_E4(stack: StackProcess) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=DEV_PAID_KEY, max_retries=5, timeout=60)
    stream = client.responses.create(
        model="default",
        input="Tell me of the mill.",
        max_output_tokens=TOKENS,
        background=True,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    seen = []
    for event in stream:
        seen.append(event)
        if sum(e.type == "response.output_text.delta" for e in seen) == 50:
            break
    stream.close()
    created = seen[0]
    assert created.type == "response.created"
    response_id = created.response.id
    kill(stack, "worker", running_worker(stack))
    kill(stack, "gateway")
    kill(stack, "edge")
    rest = list(
        client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
    )
    events = [*seen, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete", last
    assert last.response.output_text == text
    eventually(
        lambda: client.responses.retrieve(response_id).output_text == text, 20, "the text is stored"
    )
    assert client.responses.retrieve(response_id).usage == last.response.usage
    again = list(client.responses.retrieve(response_id, stream=True))
    assert again == events


def running_worker(stack: StackProcess) -> int:
    """Index of the worker that writes the one reply."""
    for role in stack.state().roles:
        if role.name == "worker" and role.port is not None:
            metrics = httpx.get(f"http://127.0.0.1:{role.port}/metrics").text
            for line in metrics.splitlines():
                if line.startswith("headrace_running ") and float(line.split()[-1]) > 0:
                    return role.index
    raise AssertionError("no worker runs the reply")
