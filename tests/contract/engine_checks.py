"""What every engine must do, as plain functions: run in this process on the simulated engine, and in the
engine environment (which has no pytest) on vLLM, with those of :mod:`tests.contract.tier_checks`:
``python -m tests.contract.engine_checks MODEL REDIS_ARGV REDIS_PORT``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from contracts.records import Sampling
from contracts.tiers import FinishReason
from workers.errors import EngineDead, RequestFailed
from workers.protocols import Engine, EngineRequest

LENGTH = FinishReason.LENGTH


@dataclass
class Bench:
    """An engine, and how to make prompts for it."""

    engine: Engine
    encode: Callable[[str], list[int]]
    context_length: int
    is_model: bool
    _count: int = 0

    def request(self, text: str, emitted: Sequence[int] = (), **sampling: Any) -> EngineRequest:
        self._count += 1
        wanted = Sampling(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **sampling})
        return EngineRequest(f"r{self._count}/1", self.encode(text), tuple(emitted), wanted, 0, "tenant")


@dataclass
class Choice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reasons: list[FinishReason] = field(default_factory=list)


async def collect(engine: Engine, request: EngineRequest) -> list[Choice]:
    choices = [Choice() for _ in range(request.sampling.n)]
    async with asyncio.timeout(60), aclosing(engine.generate(request)) as deltas:
        async for delta in deltas:
            choice = choices[delta.index]
            assert not choice.finish_reasons, "a delta after the last one"
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs or ()
            if delta.finish_reason is not None:
                choice.finish_reasons.append(delta.finish_reason)
    return choices


def text_of(engine: Engine, request: EngineRequest, token_ids: Sequence[int]) -> str:
    detokenizer = engine.detokenizer(request)
    return "".join(detokenizer.push(t) for t in token_ids) + detokenizer.finish()


async def until_idle(engine: Engine) -> None:
    async with asyncio.timeout(10):
        while engine.capacity().running:
            await asyncio.sleep(0.01)


async def check_exactly_the_budget_then_one_finish(bench: Bench) -> None:
    (choice,) = await collect(bench.engine, bench.request("count", max_tokens=12))
    assert len(choice.token_ids) == 12
    assert choice.finish_reasons == [LENGTH]


async def check_the_same_request_gives_the_same_tokens(bench: Bench) -> None:
    first, second = [await collect(bench.engine, bench.request("same")) for _ in range(2)]
    assert first[0].token_ids == second[0].token_ids


async def check_each_choice_finishes_once_B4(bench: Bench) -> None:
    choices = await collect(bench.engine, bench.request("three", n=3, temperature=0.9, seed=1))
    assert [c.finish_reasons for c in choices] == [[LENGTH]] * 3
    assert [len(c.token_ids) for c in choices] == [16] * 3


async def check_greedy_choices_are_all_the_greedy_reply_B4(bench: Bench) -> None:
    if not bench.is_model:
        return  # its choices differ whatever the temperature
    (alone,) = await collect(bench.engine, bench.request("two"))
    choices = await collect(bench.engine, bench.request("two", n=2))
    assert [c.token_ids for c in choices] == [alone.token_ids] * 2


async def check_a_continued_reply_is_the_rest_I1(bench: Bench) -> None:
    request = bench.request("tell me a story", max_tokens=24)
    whole = (await collect(bench.engine, request))[0].token_ids
    text = text_of(bench.engine, request, whole)
    for cut in (1, 2, 11, 23):
        later = bench.request("tell me a story", emitted=whole[:cut], max_tokens=24)
        rest = (await collect(bench.engine, later))[0]
        assert rest.token_ids == whole[cut:], f"after {cut} tokens"
        assert rest.finish_reasons == [LENGTH]
        joined = text_of(bench.engine, request, whole[:cut]) + text_of(
            bench.engine, later, rest.token_ids
        )
        assert joined == text, f"text after {cut} tokens"


#: Ways to sample whose state covers the tokens of earlier attempts.
STATEFUL: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2, "logit_bias": {20: 3.0, 30: -50.0}},
    "repetition": {"repetition_penalty": 1.3},
    "all": {"presence_penalty": 0.8, "frequency_penalty": -0.4, "repetition_penalty": 1.2},
    "minimum": {"min_tokens": 20, "ignore_eos": False, "presence_penalty": 1.0},
}


async def check_penalties_and_minimum_go_on_where_they_were_I1(bench: Bench) -> None:
    async def joined(name: str, cut: int) -> None:
        options = {"max_tokens": 20 + cut, **STATEFUL[name]}
        request = bench.request(f"List words about {name}.", **options)
        assert bench.engine.continues(request.sampling)
        whole = (await collect(bench.engine, request))[0].token_ids
        later = bench.request(f"List words about {name}.", emitted=whole[:cut], **options)
        rest = (await collect(bench.engine, later))[0].token_ids
        assert rest == whole[cut:], f"{name} after {cut} tokens"

    for name in STATEFUL:
        await joined(name, 9)
    # Together, of different lengths: the rows of the engine's batch move.
    await asyncio.gather(*(joined(name, cut) for cut in (3, 8, 15) for name in STATEFUL))


async def check_logprobs_go_on_where_they_were_I1(bench: Bench) -> None:
    options = {"max_tokens": 12, "top_logprobs": 2, "frequency_penalty": 1.0}
    request = bench.request("logprobs", **options)
    assert bench.engine.continues(request.sampling)
    (whole,) = await collect(bench.engine, request)
    later = bench.request("logprobs", emitted=whole.token_ids[:5], **options)
    (rest,) = await collect(bench.engine, later)
    for one, other in zip(rest.logprobs, whole.logprobs[5:], strict=True):
        assert one["token"] == other["token"]
        assert abs(one["logprob"] - other["logprob"]) < 1e-3


async def check_a_seeded_continuation_is_repeatable_I1(bench: Bench) -> None:
    options = {"max_tokens": 20, "temperature": 1.0, "seed": 7}
    whole = (await collect(bench.engine, bench.request("seeded", **options)))[0].token_ids
    later = [bench.request("seeded", emitted=whole[:6], **options) for _ in range(2)]
    first, second = [(await collect(bench.engine, r))[0].token_ids for r in later]
    assert first == second
    assert len(first) == 14


async def check_a_schema_cannot_be_continued_I1(bench: Bench) -> None:
    assert not bench.engine.continues(Sampling(json_schema={"type": "object"}))
    assert bench.engine.continues(Sampling(temperature=1.0, stop=["x"], seed=1, top_logprobs=3))


async def check_replies_at_once_equal_replies_alone(bench: Bench) -> None:
    texts = [f"topic {i}" for i in range(6)]
    alone = [await collect(bench.engine, bench.request(t)) for t in texts]
    together = await asyncio.gather(*(collect(bench.engine, bench.request(t)) for t in texts))
    assert [c[0].token_ids for c in together] == [c[0].token_ids for c in alone]


async def check_closing_the_iterator_frees_the_room_D1(bench: Bench) -> None:
    before = bench.engine.capacity()
    generator = bench.engine.generate(bench.request("long", n=2, max_tokens=200, temperature=0.5))
    async with asyncio.timeout(30):
        await anext(generator)
        assert bench.engine.capacity().running == 2
        await generator.aclose()
    await until_idle(bench.engine)
    after = bench.engine.capacity()
    assert (after.max_seqs, after.kv_tokens_total) == (before.max_seqs, before.kv_tokens_total)
    assert after.kv_tokens_total > 0


async def check_cancelling_the_task_frees_the_room_D1(bench: Bench) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async with aclosing(bench.engine.generate(bench.request("long", max_tokens=200))) as deltas:
            async for _ in deltas:
                started.set()

    tasks = [asyncio.create_task(read()) for _ in range(3)]
    async with asyncio.timeout(30):
        await started.wait()
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(r, asyncio.CancelledError)
            for r in await asyncio.gather(*tasks, return_exceptions=True)
        )
    await until_idle(bench.engine)


async def check_a_bad_request_fails_alone_A4(bench: Bench) -> None:
    good = asyncio.create_task(collect(bench.engine, bench.request("fine", max_tokens=24)))
    request = bench.request("x")
    too_long = request.prompt_token_ids * (1 + bench.context_length // len(request.prompt_token_ids))
    bad = EngineRequest("bad/1", too_long, (), request.sampling, 0, "tenant")
    try:
        await collect(bench.engine, bad)
    except RequestFailed as error:
        assert error.client_fault  # noqa: PT017
    else:
        raise AssertionError("it was accepted")
    assert (await good)[0].finish_reasons == [LENGTH]
    await bench.engine.check()
    await until_idle(bench.engine)


async def check_logprobs_have_the_shape_of_the_openai_api(bench: Bench) -> None:
    (choice,) = await collect(bench.engine, bench.request("logprobs", max_tokens=4, top_logprobs=2))
    assert len(choice.logprobs) == len(choice.token_ids) == 4
    for item in choice.logprobs:
        assert set(item) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(item["top_logprobs"]) == 2
        assert bytes(item["bytes"]).decode("utf-8", "replace") == item["token"]
        json.dumps(item, allow_nan=False)
    (choice,) = await collect(bench.engine, bench.request("logprobs", max_tokens=2, top_logprobs=0))
    assert [item["top_logprobs"] for item in choice.logprobs] == [[], []]


async def check_the_prompt_never_shows_in_the_text_A5(bench: Bench) -> None:
    request = bench.request("unmistakable prompt words")
    assert engine_silent(bench.engine, request) == ""
    (choice,) = await collect(bench.engine, request)
    text = text_of(bench.engine, request, choice.token_ids)
    assert text
    assert "unmistakable prompt" not in text


def engine_silent(engine: Engine, request: EngineRequest) -> str:
    return engine.detokenizer(request).finish()


async def check_structured_output_follows_its_schema(bench: Bench) -> None:
    if not bench.is_model:
        return  # the simulated engine knows no schemas, see docs/SIM_ENGINE.md
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
    request = bench.request("Name a city.", max_tokens=60, json_schema=schema, ignore_eos=False)
    (choice,) = await collect(bench.engine, request)
    assert set(json.loads(text_of(bench.engine, request, choice.token_ids))) == {"city"}
    assert choice.finish_reasons == [FinishReason.STOP]


async def check_the_end_of_sequence_has_no_text_B5(bench: Bench) -> None:
    if not bench.is_model:
        return  # scripted: tests/unit/workers/test_engine_sim.py
    request = bench.request("Say only the word yes.", max_tokens=60, ignore_eos=False)
    (choice,) = await collect(bench.engine, request)
    assert choice.finish_reasons == [FinishReason.STOP]
    assert "<|" not in text_of(bench.engine, request, choice.token_ids)


async def check_a_closed_engine_is_dead_and_closes_twice_I7(bench: Bench) -> None:
    await bench.engine.close()
    await bench.engine.close()
    for call in (bench.engine.check(), collect(bench.engine, bench.request("late"))):
        try:
            await call
        except EngineDead:
            continue
        raise AssertionError("it still works")


Check = Callable[[Bench], Awaitable[None]]
#: In this order; the last one closes the engine.
CHECKS: dict[str, Check] = {n: f for n, f in list(globals().items()) if n.startswith("check_")}


async def _run(model: str, redis_argv: list[str], redis_port: int) -> dict[str, str | None]:
    """All checks on one vLLM, which has a KV tier, and then of the tier below vLLM's offloading."""
    from tests.contract import offload_checks, tier_checks
    from tests.tcp_proxy import tcp_proxy

    server = tier_checks.Server(redis_argv, redis_port)
    await server.start()
    try:
        async with tcp_proxy(redis_port) as proxy:
            bench = await _vllm(model, proxy.url)
            tier = tier_checks.TierBench(bench.engine, server, proxy)
            results = await results_of(tier_checks.CHECKS, tier)
            results |= await results_of(CHECKS, bench)
    finally:
        await server.kill()
    return results | await offload_checks.run(redis_argv, redis_port)


async def _vllm(model: str, tier_url: str) -> Bench:
    from transformers import AutoTokenizer

    from infra.settings import KvSettings, VllmSettings
    from kv.tier import Tier
    from tests.contract.tier_checks import BLOCK, CHUNK
    from workers.engine_vllm import VllmEngine

    settings = VllmSettings(dtype="float32", enforce_eager=True, block_tokens=BLOCK)
    kv = KvSettings(
        enabled=True,
        redis_url=tier_url,
        chunk_tokens=CHUNK,
        lookup_ms=150,
        load_seconds=4,
        save_seconds=1,
    )
    tier = Tier(kv, "redis://127.0.0.1:1/0", "checked", "1")
    engine = VllmEngine(model, settings, max_seqs=16, context_length=1_024, tier=tier)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(text: str) -> list[int]:
        turn = [{"role": "user", "content": text}]
        found = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True)
        return list(found if isinstance(found, list) else found["input_ids"])

    await engine.start()
    return Bench(engine, encode, 1_024, is_model=True)


async def results_of(checks: dict[str, Any], bench: Any) -> dict[str, str | None]:
    results: dict[str, str | None] = {}
    for name, check in checks.items():
        try:
            await check(bench)
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()[-2_000:]
    return results


if __name__ == "__main__":
    found = asyncio.run(_run(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])))
    sys.stdout.write(json.dumps(found) + "\n")
