"""Timing, room and scripted faults of the simulated engine, in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from contracts.records import Sampling
from contracts.sim_tokens import sim_token_ids
from contracts.tiers import FinishReason
from infra.settings import SimSettings
from tests.unit.virtual_time import run_in_virtual_time
from workers.engine_sim import SimEngine
from workers.errors import EngineDead, RequestFailed
from workers.protocols import EngineRequest, TokenDelta
from workers.sim_script import ScriptError
from workers.sim_text import EOS

Timed = list[tuple[float, TokenDelta]]


def request(text: str = "hi", rid: str = "r", attempt: int = 1, **s: Any) -> EngineRequest:
    return EngineRequest(
        f"{rid}/{attempt}", sim_token_ids(text), (), Sampling(**{"max_tokens": 5, **s}), 0, ""
    )


async def timed(engine: SimEngine, wanted: EngineRequest) -> Timed:
    loop = asyncio.get_running_loop()
    began = loop.time()
    found: Timed = []
    async with aclosing(engine.generate(wanted)) as deltas:
        async for delta in deltas:
            found.append((round(loop.time() - began, 6), delta))
    return found


def with_engine(
    work: Callable[[SimEngine], Awaitable[None]], max_seqs: int = 8, kv: int | None = None, **s: Any
) -> None:
    async def main() -> None:
        engine = SimEngine(SimSettings(**{"ttft_ms": 40, "tpot_ms": 10, **s}), max_seqs, kv)
        await engine.start()
        await work(engine)
        await engine.close()

    run_in_virtual_time(main())


def test_it_has_no_kv_tier_to_tell_of() -> None:
    assert SimEngine(SimSettings(), 1).take_tier_news(10) is None


def script_file(folder: Path, *replies: dict[str, Any]) -> str:
    file = folder / "script.json"
    file.write_text(json.dumps({"replies": replies}))
    return str(file)


def test_first_token_after_ttft_then_one_every_tpot_without_drift() -> None:
    async def work(engine: SimEngine) -> None:
        found = await timed(engine, request(max_tokens=200))
        assert [at for at, _ in found] == pytest.approx([0.04 + 0.01 * i for i in range(200)], abs=1e-3)
        assert found[-1][1].finish_reason is FinishReason.LENGTH

    with_engine(work)


def test_later_requests_join_the_common_steps() -> None:
    async def work(engine: SimEngine) -> None:
        first = asyncio.create_task(timed(engine, request("a", "a", max_tokens=20)))
        await asyncio.sleep(0.053)
        second = await timed(engine, request("b", "b", max_tokens=3))
        assert [at for at, _ in second] == pytest.approx([0.04, 0.047, 0.057], abs=1e-3)
        await first

    with_engine(work)


def test_each_further_request_slows_the_steps_down() -> None:
    async def work(engine: SimEngine) -> None:
        both = await asyncio.gather(*(timed(engine, request(t, t, max_tokens=3)) for t in "ab"))
        for found in both:
            assert [at for at, _ in found] == pytest.approx([0.04, 0.055, 0.07], abs=1.1e-3)

    with_engine(work, slowdown_per_request=0.5)


def test_an_engine_kept_from_its_timer_catches_up_in_larger_deltas() -> None:
    async def work(engine: SimEngine) -> None:
        generator = engine.generate(request(max_tokens=12))
        await anext(generator)
        loop = asyncio.get_running_loop()
        loop._jumping.now += 0.05  # type: ignore[attr-defined]
        sizes = [len(delta.token_ids) async for delta in generator]
        assert max(sizes) > 1
        assert sum(sizes) == 11

    with_engine(work)


def test_requests_wait_for_slots_and_the_most_urgent_goes_first_L1() -> None:
    async def work(engine: SimEngine) -> None:
        order: list[str] = []

        async def run(name: str, priority: int) -> None:
            r = request(name, name)
            await timed(
                engine, EngineRequest(r.engine_id, r.prompt_token_ids, (), r.sampling, priority, "")
            )
            order.append(name)

        jobs = [asyncio.create_task(run(n, p)) for n, p in (("first", 1), ("batch", 2), ("urgent", 0))]
        await asyncio.sleep(0.001)
        assert engine.capacity().running == 3
        await asyncio.gather(*jobs)
        assert order == ["first", "urgent", "batch"]
        assert engine.capacity().running == 0

    with_engine(work, max_seqs=1)


def test_kv_room_is_taken_by_prompt_and_output_and_given_back_D1() -> None:
    async def work(engine: SimEngine) -> None:
        generator = engine.generate(request("one two three", max_tokens=50))
        await anext(generator)
        assert engine.capacity().kv_tokens_free == 100 - 3 - 1
        await generator.aclose()
        assert engine.capacity().kv_tokens_free == 100

    with_engine(work, kv=100)


def test_a_scripted_reply_ends_with_its_last_piece_B5(tmp_path: Path) -> None:
    async def work(engine: SimEngine) -> None:
        found = [d for _, d in await timed(engine, request("say [[hi]]"))]
        assert [len(d.token_ids) for d in found] == [1, 1]
        assert found[-1].token_ids == (EOS,)
        assert found[-1].finish_reason is FinishReason.STOP
        longer = [d for _, d in await timed(engine, request("say [[hi]]", ignore_eos=True))]
        assert longer[-1].finish_reason is FinishReason.LENGTH
        first = [d for _, d in await timed(engine, request("[[eos]]"))]
        assert [d.token_ids for d in first] == [(EOS,)]

    replies = {"match": "[[hi]]", "pieces": ["hi"], "then": "eos"}, {"match": "[[eos]]", "eos_at": 0}
    with_engine(work, script=script_file(tmp_path, *replies))


def test_a_scripted_failure_hits_its_token_and_nobody_else_B7(tmp_path: Path) -> None:
    async def work(engine: SimEngine) -> None:
        other = asyncio.create_task(timed(engine, request("fine", "o")))
        seen: list[TokenDelta] = []
        with pytest.raises(RequestFailed):  # noqa: PT012
            async for delta in engine.generate(request("[[bad]]")):
                seen.append(delta)  # noqa: PERF401
        assert sum(len(d.token_ids) for d in seen) == 3
        assert (await other)[-1][1].finish_reason is FinishReason.LENGTH
        again = await timed(engine, request("[[bad]]", attempt=2))
        assert again[-1][1].finish_reason is FinishReason.LENGTH

    with_engine(work, script=script_file(tmp_path, {"match": "[[bad]]", "raise_at": 3, "attempt": 1}))


def test_a_hanging_reply_keeps_its_slot_until_it_is_aborted(tmp_path: Path) -> None:
    async def work(engine: SimEngine) -> None:
        generator = engine.generate(request("[[hang]]"))
        await anext(generator)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(generator), 60)
        assert engine.capacity().running == 0
        generator = engine.generate(request("[[hang]]"))
        await anext(generator)
        assert engine.capacity().running == 1
        await generator.aclose()
        assert engine.capacity().running == 0

    with_engine(work, script=script_file(tmp_path, {"match": "[[hang]]", "hang_at": 1}))


def test_a_dead_engine_fails_all_its_requests_I7(tmp_path: Path) -> None:
    async def work(engine: SimEngine) -> None:
        jobs = [timed(engine, request("fine", "a")), timed(engine, request("[[die]]", "b"))]
        found = await asyncio.gather(*jobs, return_exceptions=True)
        assert [type(f) for f in found] == [EngineDead, EngineDead]
        with pytest.raises(EngineDead):
            await engine.check()
        with pytest.raises(EngineDead):
            await timed(engine, request())

    with_engine(work, script=script_file(tmp_path, {"match": "[[die]]", "dead_at": 2}))


def test_scripted_pauses_replace_the_engines(tmp_path: Path) -> None:
    async def work(engine: SimEngine) -> None:
        found = await timed(engine, request("[[slow]]", max_tokens=3))
        assert [at for at, _ in found] == pytest.approx([0.1, 0.13, 0.16], abs=1.1e-3)

    reply = {"match": "[[slow]]", "ttft_ms": 100, "tpot_ms": 30}
    with_engine(work, script=script_file(tmp_path, reply))


async def test_a_missing_script_is_said_at_the_start() -> None:
    engine = SimEngine(SimSettings(script="/nowhere/script.json"), 1)
    with pytest.raises(ScriptError, match="nowhere"):
        await engine.start()
