"""A line's way to its result, whatever its requests have come to before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, cast

import pytest

from contracts.entries import Accepted, Entry, Moderated, Started, StreamEntry, Terminal, Text
from contracts.errors import ApiError, ErrorCode, error_body
from contracts.identity import Principal, is_request_id, make_request_id
from contracts.stream_ids import ACCEPTED, MODERATED, SEAL, StreamId
from contracts.tiers import FinishReason, Status
from infra.settings import development
from producers.batch.entrance import Entrance
from producers.batch.ids import line_bytes
from producers.batch.line_runner import FinishedLine, LineRunner
from producers.batch.running import Running
from producers.batch.seal_watch import SealWatch
from producers.chat_request import ChatRequest
from tests.batches import begun, input_lines

BATCH = begun(1, key_id="dev", tenant="dev")
LINE = input_lines(["a"]).strip()


class Pipeline:
    """Intake, streams and all behind them: a request is answered as soon as it is submitted."""

    def __init__(self) -> None:
        self.streams: dict[str, dict[StreamId, Entry]] = {}
        self.submitted: list[str] = []
        self.refusals: list[ErrorCode] = []
        self.ends: list[Terminal] = []
        self.answers = True
        self.principals: list[Principal] = []
        self.requests: list[ChatRequest] = []

    def accept(self, request_id: str) -> None:
        accepted = Accepted(tenant="dev", tier="batch", model="headrace-sim", created_ms=1)
        self.streams.setdefault(request_id, {})[ACCEPTED] = accepted

    def answer(self, request_id: str) -> None:
        end = Terminal(status=Status.COMPLETED, finish_reasons=[FinishReason.STOP])
        entries = self.streams[request_id]
        entries[MODERATED] = Moderated(prompt_tokens=3)
        entries[StreamId(1, 0)] = Started(worker_id="w", model_revision="1", tokens_out=0)
        entries[StreamId(1, 1)] = Text("hello", (1,))
        entries[SEAL] = self.ends.pop(0) if self.ends else end

    async def submit(self, principal: Principal, request: ChatRequest, *, request_id: str) -> None:
        if self.refusals:
            raise ApiError(self.refusals.pop(0), "No.")
        self.submitted.append(request_id)
        self.principals.append(principal)
        self.requests.append(request)
        self.accept(request_id)
        if self.answers:
            self.answer(request_id)

    async def last_ids(self, request_ids: Sequence[str]) -> list[StreamId | None]:
        return [max(self.streams.get(request_id, {None: None})) for request_id in request_ids]  # type: ignore[type-var]

    async def read_all(self, request_id: str) -> list[StreamEntry]:
        return [StreamEntry(at, entry) for at, entry in sorted(self.streams[request_id].items())]

    async def seal(self, request_id: str, terminal: Terminal) -> None:
        self.streams[request_id].setdefault(SEAL, terminal)

    async def seal_many(self, seals: Sequence[tuple[str, Terminal]]) -> None:
        for request_id, terminal in seals:
            await self.seal(request_id, terminal)


def request_id(attempt: int = 0) -> str:
    return make_request_id(BATCH.created_ms, line_bytes(BATCH, 1, attempt))


class Rig:
    def __init__(self, pipeline: Pipeline) -> None:
        self.watch = SealWatch(cast(Any, pipeline))
        self.runner = LineRunner(
            lambda: development("sim"),
            cast(Any, pipeline),
            cast(Any, pipeline),
            self.watch,
            Entrance(1, 1.0),
        )
        self.running = Running(asyncio.Semaphore(1))

    async def run(self, batch: Any = BATCH) -> FinishedLine | None:
        watching = asyncio.create_task(self.watch.run())
        try:
            slot = await self.running.slot()
            return await asyncio.wait_for(
                self.runner.run(batch, 1, LINE, self.running, slot), timeout=10
            )
        finally:
            watching.cancel()


async def result(pipeline: Pipeline, batch: Any = BATCH) -> dict[str, Any]:
    finished = await Rig(pipeline).run(batch)
    assert finished is not None
    found: dict[str, Any] = json.loads(finished.result.text)
    assert found["custom_id"] == "a"
    return cast(dict[str, Any], found["response"])


async def test_a_line_is_submitted_under_its_own_id_for_its_creator() -> None:
    pipeline = Pipeline()
    response = await result(pipeline)
    assert response["body"]["choices"][0]["message"]["content"] == "hello"
    assert pipeline.submitted == [response["request_id"]] == [request_id()]
    assert is_request_id(request_id())
    assert pipeline.principals == [Principal(key_id="dev", tenant="dev", tier="batch")]
    assert pipeline.requests[0].leave_grace_ms is None


@pytest.mark.parametrize("sealed", [True, False])
async def test_what_another_runner_began_is_followed_and_not_made_again_K13(sealed: bool) -> None:
    pipeline = Pipeline()
    pipeline.accept(request_id())
    pipeline.answer(request_id())
    end = pipeline.streams[request_id()][SEAL]
    if not sealed:
        del pipeline.streams[request_id()][SEAL]
        asyncio.get_running_loop().call_later(
            0.05, pipeline.streams[request_id()].__setitem__, SEAL, end
        )
    assert (await result(pipeline))["status_code"] == 200
    assert pipeline.submitted == []


async def test_what_another_runner_left_between_stream_and_record_is_submitted_again_K13() -> None:
    pipeline = Pipeline()
    pipeline.accept(request_id())
    assert (await result(pipeline))["status_code"] == 200
    assert pipeline.submitted == [request_id()]


async def test_a_request_that_was_lost_is_made_again_under_another_id() -> None:
    pipeline = Pipeline()
    lost = error_body(ErrorCode.WORKER_LOST, "Lost.")
    pipeline.ends = [Terminal(status=Status.FAILED, error=lost), Terminal(status=Status.EXPIRED)]
    assert (await result(pipeline))["request_id"] == request_id(2)
    assert pipeline.submitted == [request_id(n) for n in range(3)]


async def test_a_refusal_that_passes_is_waited_for_and_others_are_the_result() -> None:
    pipeline = Pipeline()
    pipeline.refusals = [ErrorCode.QUEUE_FULL]
    assert (await result(pipeline))["status_code"] == 200
    pipeline = Pipeline()
    pipeline.refusals = [ErrorCode.EXCEEDS_LIMIT]
    assert (await result(pipeline))["body"]["error"]["code"] == "request_exceeds_limit"


async def test_a_key_that_is_gone_runs_no_more_lines() -> None:
    pipeline = Pipeline()
    response = await result(pipeline, BATCH.model_copy(update={"key_id": "gone"}))
    assert response["body"]["error"]["code"] == "invalid_api_key"
    assert pipeline.submitted == []


async def test_a_batch_that_ends_cuts_off_what_runs() -> None:
    pipeline = Pipeline()
    pipeline.answers = False
    rig = Rig(pipeline)
    line = asyncio.create_task(rig.run())
    while not pipeline.submitted:
        await asyncio.sleep(0)
    await rig.runner.cut_off(rig.running)
    assert await line is None
    assert rig.running.requests == set()
    assert (await pipeline.last_ids(pipeline.submitted)) == [SEAL]


async def test_a_line_that_its_caller_cancelled_is_its_result() -> None:
    pipeline = Pipeline()
    pipeline.ends = [Terminal(status=Status.CANCELLED)]
    assert (await result(pipeline))["body"]["error"]["code"] == "cancelled"
