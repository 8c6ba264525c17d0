"""Stands in for everything behind the gateway: plays the script that a request's last message holds.

The script is JSON: ``tokens`` (pieces of text, one token each), ``repeat`` (play them so often),
``refuse`` / ``fail_after`` (end badly),
``hold_before`` (wait for :meth:`PipelineDouble.release` before token k, or before moderation at ``-1``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from aiokafka import AIOKafkaConsumer

from contracts.entries import Dispatched, Moderated, Terminal, Text
from contracts.errors import ErrorCode, error_body
from contracts.records import RequestRecord, Usage, decode
from contracts.stream_ids import DISPATCHED, MODERATED, StreamId
from contracts.tiers import FinishReason, Status
from contracts.token_stream import Appended
from infra.settings import Settings
from infra.stream_redis import RedisTokenStreams
from tests.attempts import start_attempt


def script(**parts: Any) -> list[dict[str, Any]]:
    """Messages whose reply is scripted."""
    return [{"role": "user", "content": json.dumps(parts)}]


class PipelineDouble:
    def __init__(self, settings: Settings, streams: RedisTokenStreams) -> None:
        self._streams = streams
        self._consumer = AIOKafkaConsumer(
            settings.kafka.topics.requests,
            bootstrap_servers=settings.kafka.bootstrap,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=5,
        )
        self._released = asyncio.Event()
        self._playing: set[asyncio.Task[None]] = set()
        self._loop_task: asyncio.Task[None] | None = None
        self.records: dict[str, RequestRecord] = {}
        self.headers: dict[str, dict[str, bytes]] = {}
        self.silent = False

    async def start(self) -> None:
        await self._consumer.start()
        self._loop_task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        tasks = [t for t in (self._loop_task, *self._playing) if t is not None]
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        await self._consumer.stop()

    def release(self) -> None:
        self._released.set()

    def hold(self) -> None:
        self._released.clear()

    async def _run(self) -> None:
        async for raw in self._consumer:
            record = decode(RequestRecord, raw.value)
            assert raw.key == record.request_id.encode()
            self.records[record.request_id] = record
            self.headers[record.request_id] = dict(raw.headers)
            if not self.silent:
                task = asyncio.create_task(self._play(record))
                self._playing.add(task)
                task.add_done_callback(self._playing.discard)

    async def _play(self, record: RequestRecord) -> None:
        rid = record.request_id
        play: dict[str, Any] = {"tokens": ["Hello", " there"], "hold_before": None, "repeat": 1}
        last = record.turn[-1].content
        if last.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                play |= json.loads(last)
        if play["hold_before"] == -1:
            await self._released.wait()
        if "refuse" in play:
            error = error_body(ErrorCode(play["refuse"]), "Refused by the double.", "messages")
            await self._streams.seal(rid, Terminal(status=Status.REFUSED, error=error))
            return
        await self._streams.append(
            [
                (rid, MODERATED, Moderated(prompt_tokens=7)),
                (rid, DISPATCHED, Dispatched(worker_id="double")),
            ]
        )
        await start_attempt(self._streams, rid, 1, "double", "rev-1")
        count = 0
        for k, piece in enumerate(play["tokens"] * play["repeat"]):
            if play["hold_before"] == k:
                await self._released.wait()
            if play.get("fail_after") == k:
                break
            for index in range(record.sampling.n):
                count += 1
                text = Text(piece, (count,), index, _logprobs(piece, record))
                (result,) = await self._streams.append([(rid, StreamId(1, count), text)])
                if result is not Appended.OK:
                    return
        terminal = Terminal(
            status=Status.COMPLETED,
            finish_reasons=[FinishReason.STOP] * record.sampling.n,
            usage=Usage(prompt_tokens=7, completion_tokens=count, cached_tokens=3),
        )
        if "fail_after" in play:
            error = error_body(ErrorCode.ENGINE_ERROR, "The engine failed.")
            terminal = Terminal(status=Status.FAILED, error=error)
        await self._streams.seal(rid, terminal)


def _logprobs(piece: str, record: RequestRecord) -> tuple[dict[str, Any], ...] | None:
    if record.sampling.top_logprobs is None:
        return None
    return ({"token": piece, "logprob": -0.5, "bytes": list(piece.encode()), "top_logprobs": []},)
