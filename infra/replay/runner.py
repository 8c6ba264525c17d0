"""Running recorded conversations again: each turn after the one before it, at the pace that is asked for."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from .sources import Message, RecordedConversation, RecordedTurn

_TIMEOUT: Final = httpx.Timeout(600.0, connect=10.0)
#: ``concurrency`` is the limit: nobody waits for a connection.
_NO_LIMITS: Final = httpx.Limits(max_connections=None)
#: A refusal that passes is waited for so often.
_TRIES: Final = 5
_LONGEST_PAUSE_SECONDS: Final = 30.0


@dataclass(frozen=True)
class ReplayOptions:
    """How it is run.

    Attributes:
        body: fields of every request: ``model``, and what else is to differ.
        speed: 1 = at the recorded pace, 2 = twice as fast; None = as fast as ``concurrency`` lets it.
        own_replies: a turn goes on after the new replies instead of the recorded ones.
    """

    body: Mapping[str, Any]
    speed: float | None = None
    concurrency: int = 8
    own_replies: bool = False


@dataclass(frozen=True)
class TurnResult:
    """What a turn came to, beside what it was. Times in milliseconds; None where there was none.

    Attributes:
        outcome: ``completed``, or the code of the error.
    """

    conversation: str
    turn: int
    recorded: RecordedTurn
    outcome: str
    text: str
    output_tokens: int | None
    ttft_ms: float | None
    duration_ms: float | None


def start_seconds(turn: RecordedTurn, first_ms: int, speed: float | None) -> float:
    """When a turn is due, seconds after the replay began. Pure."""
    return max(0, turn.at_ms - first_ms) / 1000 / speed if speed is not None else 0.0


async def replay(
    conversations: Sequence[RecordedConversation],
    options: ReplayOptions,
    url: str,
    key: str,
    done: Callable[[TurnResult], None],
) -> None:
    """Run them against a gateway; ``done`` is called with each turn as it ends."""
    first_ms = min((c.turns[0].at_ms for c in conversations), default=0)
    began = time.monotonic()
    places = asyncio.Semaphore(options.concurrency)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        headers=headers, timeout=_TIMEOUT, limits=_NO_LIMITS, trust_env=False
    ) as client:

        async def run(conversation: RecordedConversation) -> None:
            said: list[Message] = []
            for number, turn in enumerate(conversation.turns):
                due = began + start_seconds(turn, first_ms, options.speed)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                said += turn.added
                async with places:
                    result = await _ask(client, url, {**options.body, "messages": said})
                outcome, text, tokens, ttft_ms, duration_ms = result
                done(
                    TurnResult(
                        conversation.id, number, turn, outcome, text, tokens, ttft_ms, duration_ms
                    )
                )
                reply = text if options.own_replies else turn.reply
                if reply is not None:
                    said.append({"role": "assistant", "content": reply})

        async with asyncio.TaskGroup() as group:
            for conversation in conversations:
                group.create_task(run(conversation))


async def _ask(
    client: httpx.AsyncClient, url: str, body: dict[str, Any]
) -> tuple[str, str, int | None, float | None, float | None]:
    """Outcome, text, output tokens, TTFT and duration of one request."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    for attempt in range(_TRIES):
        began = time.monotonic()
        try:
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                if answer.status_code in (429, 503) and attempt + 1 < _TRIES:
                    pause = float(answer.headers.get("retry-after", 1))
                    await asyncio.sleep(min(max(pause, 0.1), _LONGEST_PAUSE_SECONDS))
                    continue
                if answer.is_error:
                    return _code(await answer.aread()), "", None, None, None
                return await _read(answer, began)
        except httpx.TransportError as error:
            return type(error).__name__, "", None, None, None
    raise AssertionError("the last try returns")


async def _read(
    answer: httpx.Response, began: float
) -> tuple[str, str, int | None, float | None, float | None]:
    parts: list[str] = []
    tokens: int | None = None
    ttft_ms: float | None = None
    outcome = "incomplete"
    async for line in answer.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            outcome = "completed"
            break
        event = json.loads(line[6:])
        if "error" in event:
            outcome = str(event["error"].get("code") or "error")
            break
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"][:1]:
            text = choice["delta"].get("content")
            if text:
                ttft_ms = ttft_ms if ttft_ms is not None else 1000 * (time.monotonic() - began)
                parts.append(text)
    return outcome, "".join(parts), tokens, ttft_ms, 1000 * (time.monotonic() - began)


def _code(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "error"
