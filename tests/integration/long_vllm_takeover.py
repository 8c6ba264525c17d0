"""Real vLLM: a worker dies in the middle of a reply, and the other one goes on from the next token.

``make takeover`` runs this; ``make test`` has no time for it, because every death is followed by a worker
that loads vLLM again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.responses_scenario import resumed_after_all_died
from tests.integration.takeover_bench import TOKENS, TakeoverBench, greedy, takeover_bench
from tests.stack_process import PAID_KEY

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


async def test_kill_9_at_three_places_of_a_reply_leaves_the_text_of_an_uninterrupted_run_I1_E2(
    tmp_path: Path,
) -> None:
    """In float32, where a continued greedy reply is the uninterrupted one to the byte."""
    with takeover_bench(tmp_path, "float32") as bench:
        whole = await bench.read(greedy())
        await bench.check_joined(whole, TOKENS, attempts=1)
        for cut in (10, 40, 120):
            await bench.both_ready()
            reading = await bench.read(greedy(), cut, bench.kill)
            assert reading.text == whole.text, f"killed at token {cut}"
            await bench.check_joined(reading, TOKENS)
            print(f"killed at token {cut}: pause {reading.pause:.2f} s")


async def test_in_bfloat16_the_join_is_exact_though_other_words_may_follow_I1_E2(tmp_path: Path) -> None:
    with takeover_bench(tmp_path, "bfloat16") as bench:
        whole = await bench.read(greedy())
        reading = await bench.read(greedy(), 40, bench.kill)
        await bench.check_joined(reading, TOKENS)
        assert whole.text.startswith(reading.text_of(1))
        print(
            f"killed at token 40: pause {reading.pause:.2f} s, same text: {reading.text == whole.text}"
        )


async def test_every_way_to_sample_is_continued_exactly_or_fails_for_a_retry_I1_I8(
    tmp_path: Path,
) -> None:
    with takeover_bench(tmp_path, "float32") as bench:
        await _frozen_worker_that_wakes(bench)
        await _continued(bench, {"presence_penalty": 1.2, "frequency_penalty": 0.6, "min_tokens": 150})
        await _continued(bench, {"logprobs": True, "top_logprobs": 2, "repetition_penalty": 1.2})
        await _refused(bench, {"response_format": {"type": "json_object"}, "ignore_eos": False})
        await _refused(bench, {"n": 2})


def test_a_background_response_is_resumed_to_the_text_of_an_uninterrupted_run_I1_E4(
    tmp_path: Path,
) -> None:
    """Client, worker, gateway and edge die; in float32."""
    with takeover_bench(tmp_path, "float32") as bench:
        text = resumed_after_all_died(bench.stack, TOKENS, temperature=0.0)
        client = openai.OpenAI(base_url=f"{bench.stack.url}/v1", api_key=PAID_KEY, timeout=120)
        whole = client.responses.create(
            model="default",
            input="Tell me of the mill.",
            max_output_tokens=TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert text == whole.output_text


async def _frozen_worker_that_wakes(bench: TakeoverBench) -> None:
    """SIGSTOP for longer than the lease, SIGCONT while the other one writes."""
    whole = await bench.read(greedy())
    waking: list[asyncio.Task[None]] = []
    frozen = asyncio.Event()

    def freeze(pid: int) -> None:
        waking.append(asyncio.create_task(bench.freeze(pid, frozen)))

    reading = await bench.read(greedy(), 40, freeze, lambda: frozen.set())
    await waking[0]
    assert reading.text == whole.text
    await bench.check_joined(reading, TOKENS)
    print(f"frozen at token 40: pause {reading.pause:.2f} s")


async def _continued(bench: TakeoverBench, options: dict[str, Any]) -> None:
    await bench.both_ready()
    whole = await bench.read(greedy(**options))
    reading = await bench.read(greedy(**options), 60, bench.kill)
    assert reading.text == whole.text, options
    await bench.check_joined(reading, TOKENS)


async def _refused(bench: TakeoverBench, options: dict[str, Any]) -> None:
    await bench.both_ready()
    reading = await bench.read(greedy(**options), 10, bench.kill)
    assert reading.end["status"] == "failed", options
    assert reading.end["error"]["code"] == "worker_lost"
    assert {offset.attempt for _, offset, _ in reading.texts} == {1}
