"""A two-worker vLLM stack whose workers are hurt while one reader reads a reply over the websocket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import websockets

from contracts.entries import Started, StreamEntry, Terminal, Text
from contracts.stream_ids import SEAL, StreamId
from infra.model_prep import model_dir
from infra.settings import development, parse
from infra.stream_redis import RedisTokenStreams, connect
from tests.stack_process import PAID_KEY, StackProcess, engine_problem

#: A worker that loads vLLM beside one that generates, on two cores.
READY_SECONDS = 150.0


TOKENS = 200


def greedy(**options: Any) -> dict[str, Any]:
    """A greedy chat body of exactly :data:`TOKENS` tokens unless ``options`` say otherwise."""
    turn = [{"role": "user", "content": "Tell me a long story about a lighthouse keeper and the sea."}]
    wanted = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **options}
    return {"model": "default", "messages": turn, **wanted}


@dataclass
class Reading:
    """What one websocket saw of a reply.

    Attributes:
        texts: arrival (monotonic seconds), offset and text of each frame, in order of arrival.
        ends: every ``stream.end`` frame.
    """

    request_id: str = ""
    texts: list[tuple[float, StreamId, str]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(text for _, _, text in self.texts)

    @property
    def tokens(self) -> int:
        return self.texts[-1][1].token if self.texts else 0

    @property
    def end(self) -> dict[str, Any]:
        assert len(self.ends) == 1, self.ends
        return self.ends[0]

    @property
    def pause(self) -> float:
        """Seconds between the last text of the first attempt and the first text of the second."""
        (first, second) = sorted({offset.attempt for _, offset, _ in self.texts})
        last = max(at for at, offset, _ in self.texts if offset.attempt == first)
        return min(at for at, offset, _ in self.texts if offset.attempt == second) - last

    def text_of(self, attempt: int) -> str:
        return "".join(text for _, offset, text in self.texts if offset.attempt == attempt)


class TakeoverBench:
    """Reads replies of a stack, and reaches the worker that runs one."""

    def __init__(self, stack: StackProcess) -> None:
        self.stack = stack
        settings = development("sim").model_dump(mode="json")
        settings["redis"]["url"] = stack.state().redis
        self._settings = parse(settings)

    async def read(
        self,
        wanted: dict[str, Any],
        at: int = 0,
        then: Callable[[int], object] | None = None,
        taken_over: Callable[[], object] = lambda: None,
    ) -> Reading:
        """Read a reply to its end.

        Args:
            then: gets its worker's pid as soon as ``at`` tokens were seen.
            taken_over: called at every text of a later attempt.
        """
        reading = Reading()
        headers = {"Authorization": f"Bearer {PAID_KEY}"}
        async with (
            asyncio.timeout(120),
            websockets.connect(self.stack.ws_url, additional_headers=headers) as socket,
        ):
            await socket.send(json.dumps({"type": "chat.create", "ref": "r", "body": wanted}))
            while not reading.ends:
                frame = json.loads(await socket.recv())
                match frame["type"]:
                    case "chat.accepted":
                        reading.request_id = frame["request_id"]
                    case "stream.text":
                        offset = StreamId.parse(frame["offset"])
                        reading.texts.append((time.monotonic(), offset, frame["text"]))
                        if then is not None and offset.token >= at:
                            then(await self._worker_pid(reading.request_id))
                            then = None
                        if offset.attempt > 1:
                            taken_over()
                    case "stream.end":
                        reading.ends.append(frame)
                    case "error":
                        raise AssertionError(frame)
            await socket.send(json.dumps({"type": "ping"}))
            while (frame := json.loads(await socket.recv()))["type"] != "pong":
                reading.ends.append(frame)
        return reading

    async def entries(self, request_id: str) -> list[StreamEntry]:
        """The whole stored stream."""
        client = connect(self._settings.redis)
        try:
            return await RedisTokenStreams(client, self._settings.streams).read_all(request_id)
        finally:
            await client.aclose()

    async def worker_index(self, request_id: str) -> int:
        """Whose the latest attempt is; the id of a worker is ``<pool>-<index>-<random>``."""
        started = [e.entry for e in await self.entries(request_id) if isinstance(e.entry, Started)]
        return int(started[-1].worker_id.split("-")[-2])

    async def _worker_pid(self, request_id: str) -> int:
        pid = self.stack.process_state("worker", await self.worker_index(request_id)).pid
        assert pid is not None
        return pid

    async def check_joined(self, reading: Reading, tokens: int, attempts: int = 2) -> None:
        """The stored stream is whole and in order, and the reader saw exactly that."""
        entries = await self.entries(reading.request_id)
        assert [e.id for e in entries] == sorted({e.id for e in entries})
        texts = [(e.id, e.entry) for e in entries if isinstance(e.entry, Text)]
        out = 0
        for entry_id, text in texts:
            out += len(text.token_ids)
            assert entry_id.token == out
        assert [(i, t.text) for i, t in texts] == [(i, t) for _, i, t in reading.texts]
        starts = [e.id for e in entries if isinstance(e.entry, Started)]
        assert starts == [StreamId(a, 0) for a in range(1, attempts + 1)]
        seals = [e for e in entries if isinstance(e.entry, Terminal)]
        assert [e.id for e in seals] == [SEAL]
        assert reading.end["status"] == "completed"
        assert reading.end["finish_reason"] == "length"
        assert reading.end["usage"]["completion_tokens"] == tokens
        # The last tokens may have no text of their own (a character that never got complete).
        assert tokens - 4 < out <= tokens

    async def both_ready(self) -> None:
        """Wait until both workers are ready; one that was killed has to be noticed first."""
        await asyncio.to_thread(self.stack.wait_ready, READY_SECONDS)

    @staticmethod
    def kill(pid: int) -> None:
        """End a worker at once."""
        os.kill(pid, signal.SIGKILL)

    @staticmethod
    async def freeze(pid: int, until: asyncio.Event) -> None:
        """Stop a worker and let it go on after ``until``."""
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(60):
                await until.wait()
        finally:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def takeover_bench(folder: Path, dtype: str) -> Iterator[TakeoverBench]:
    """``headrace up`` with two vLLM workers of this dtype."""
    problem = engine_problem()
    if problem is not None:
        pytest.fail(problem, pytrace=False)
    raw = development("vllm", str(model_dir())).model_dump(mode="json")
    raw["worker"]["vllm"]["dtype"] = dtype
    config = folder / f"{dtype}.json"
    config.write_text(json.dumps(raw))
    with StackProcess(folder / "data", "--config", str(config), "--workers", "2") as stack:
        stack.wait_ready(READY_SECONDS)
        yield TakeoverBench(stack)
