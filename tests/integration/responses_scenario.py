"""A background response whose client, worker, gateway and edge die at its fiftieth piece of text."""

from __future__ import annotations

import os
import signal
from functools import partial

import httpx
import openai

from tests.stack_process import PAID_KEY, StackProcess, eventually

#: Pieces of text that the client has when everything dies.
SEEN = 50


def resumed_after_all_died(stack: StackProcess, tokens: int, **sampling: float) -> str:
    """The whole text, after every check of the resumed, the stored and the repeated stream."""
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=PAID_KEY, max_retries=5, timeout=60)
    stream = client.responses.create(
        model="default",
        input="Tell me of the mill.",
        max_output_tokens=tokens,
        background=True,
        stream=True,
        extra_body={"ignore_eos": True, **sampling},
    )
    seen = []
    for event in stream:
        seen.append(event)
        if sum(e.type == "response.output_text.delta" for e in seen) == SEEN:
            break
    stream.close()
    created = seen[0]
    assert created.type == "response.created"
    response_id = created.response.id
    _kill(stack, "worker", _running_worker(stack))
    for role in ("gateway", "edge"):
        old = _kill(stack, role)
        eventually(partial(_is_new, stack, role, old), 30, f"{role} is back")
    rest = list(
        client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
    )
    events = [*seen, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete", last
    assert last.response.output_text == text
    assert last.response.usage.output_tokens == tokens
    eventually(
        lambda: client.responses.retrieve(response_id).output_text == text, 20, "the text is stored"
    )
    assert client.responses.retrieve(response_id).usage == last.response.usage
    again = list(client.responses.retrieve(response_id, stream=True))
    assert again == events
    return text


def _kill(stack: StackProcess, role: str, index: int = 0) -> int:
    """``kill -9``; the pid it had."""
    pid = stack.process_state(role, index).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def _is_new(stack: StackProcess, role: str, old: int) -> bool:
    new = stack.process_state(role)
    return new.ready and new.pid != old


def _running_worker(stack: StackProcess) -> int:
    """Index of the worker that writes the one reply."""
    for role in stack.state().roles:
        if role.name == "worker" and role.port is not None:
            metrics = httpx.get(f"http://127.0.0.1:{role.port}/metrics").text
            for line in metrics.splitlines():
                if line.startswith("headrace_running ") and float(line.split()[-1]) > 0:
                    return role.index
    raise AssertionError("no worker runs the reply")
