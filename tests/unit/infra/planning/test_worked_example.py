"""400 billion parameters in BF16 on 80 GB GPUs: the tool's numbers against arithmetic written out here.

The same steps stand in docs/PLANNING.md. Nothing below uses the planner's own functions to expect anything.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from infra.planning.make import make_plan
from infra.planning.memory import Shape
from infra.planning.plan import Plan
from infra.planning.reasons import reasons
from infra.planning.sizing import Option
from tests.planning import inputs

DOCS = Path(__file__).parents[4] / "docs" / "PLANNING.md"

PARAMETERS = 400e9
WEIGHTS = PARAMETERS * 2
KV_TOKEN = 2 * 126 * 8 * 128 * 2
USABLE = 80e9 * 0.9 - 3e9
BANDWIDTH = 3_350e9 * 0.7
FLOPS = 989e12 * 0.45


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(inputs())


def option(plan: Plan, tp: int, pp: int) -> Option:
    return next(o for o in plan.sizing.options if o.shape == Shape(tp, pp))


def link_seconds(tokens: float) -> float:
    """TP8, 63 layers a stage: 126 all-reduces, each 15 µs and 7/4 of the activations over NVLink; a hop."""
    activations = tokens * 16_384 * 2
    return 126 * (15e-6 + activations * 1.75 / (450e9 * 0.7)) + 50e-6 + activations / 50e9


def step_seconds(running: float, context: float) -> float:
    """TP8 x PP2: a token passes two stages, each reads half the weights and its half of the batch's cache."""
    batch = max(1.0, running / 2)
    read = (WEIGHTS / 16 + batch * context * KV_TOKEN / 16) / BANDWIDTH
    assert read > batch * (2 * PARAMETERS + 4 * 126 * 128 * 128 * context) / 16 / FLOPS, "memory-bound"
    return 2 * (read + link_seconds(batch)) + 2e-3


#: A prompt of 2,000 tokens of which 1,000 are cached: by how much it lengthens a step of a stage.
PREFILL = (
    2 * PARAMETERS * 1_000 + 4 * 126 * 128 * 128 * (2_000**2 - 1_000**2) / 2
) / 16 / FLOPS + link_seconds(1_000)


def test_ten_gpus_hold_nothing_but_weights(plan: Plan) -> None:
    assert WEIGHTS == 800e9
    assert plan.sizing.weights_only == 800 / 80 == 10
    assert plan.sizing.divided == math.ceil(800 / 69) == 12


def test_twelve_gpus_have_no_room_for_one_conversation(plan: Plan) -> None:
    twelve = option(plan, 4, 3)
    assert KV_TOKEN == 516_096
    left = USABLE - WEIGHTS / 12
    assert twelve.room_tokens == math.floor(left / (KV_TOKEN / 12) / 16) * 16 == 54_240
    assert twelve.contexts < 1
    assert not twelve.starts


def test_the_minimum_is_two_nodes(plan: Plan) -> None:
    least = plan.sizing.minimal
    assert least is not None
    assert least.shape == Shape(8, 2)
    assert least.weight_bytes_per_gpu == 50e9
    assert least.room_tokens == math.floor((USABLE - 50e9) / (KV_TOKEN / 16) / 16) * 16 == 589_024
    assert least.contexts == pytest.approx(589_024 / 131_072)
    assert least.capacity.fits == 589_024 // 2_400 == 245
    assert least.alone_tpot_seconds == pytest.approx(step_seconds(1, 2_000))


def test_smaller_numbers_that_start_pay_with_every_token(plan: Plan) -> None:
    thirteen = option(plan, 1, 13)
    assert thirteen.starts
    assert not thirteen.whole_nodes
    # 13 stages of at most 10 layers, each read by one GPU alone, one after the other.
    weights = WEIGHTS * 10 / 126 / BANDWIDTH
    cache = 2_000 * KV_TOKEN * 10 / 126 / BANDWIDTH
    hop = 50e-6 + 16_384 * 2 / 50e9
    assert thirteen.alone_tpot_seconds == pytest.approx(13 * (weights + cache + hop) + 2e-3)
    assert thirteen.alone_tpot_seconds > 7 * step_seconds(1, 2_000)


def test_one_replica_at_its_bound(plan: Plan) -> None:
    point = option(plan, 8, 2).capacity.point
    assert point is not None
    # 127 replies: in one cycle each gets 400 tokens, and 127 prompts are prefilled.
    cycle = 400 * step_seconds(127, 2_200) + 127 * PREFILL
    assert point.running == 127
    assert point.rate == pytest.approx(127 / cycle)
    assert point.tpot_seconds == pytest.approx(cycle / 400)
    one_more = (400 * step_seconds(128, 2_200) + 128 * PREFILL) / 400
    assert point.tpot_seconds <= 0.1 < one_more


def test_recommended_is_what_the_peak_takes_and_a_spare(plan: Plan) -> None:
    best = plan.sizing.recommended
    assert best is not None
    rate = 127 / (400 * step_seconds(127, 2_200) + 127 * PREFILL)
    peak = 1_000 * 12 / 3_600 * 0.9
    assert plan.demand.peak.rate == pytest.approx(peak)
    assert best.shape == Shape(8, 2)
    assert best.needed == math.ceil(peak / (0.7 * rate)) == 2
    assert best.total_gpus == (2 + 1) * 16 == 48


def test_first_token_at_the_peak(plan: Plan) -> None:
    best = plan.sizing.recommended
    assert best is not None
    assert best.load is not None
    running = best.load.running
    step = step_seconds(running, 2_200)
    assert running / (400 * step + running * PREFILL) == pytest.approx(1.5)
    service = PREFILL + step * 1_000 / 2_048
    residual = 1.5 * service**2 / 2
    paid, both = 1.5 * service / 3, 1.5 * service
    # One chunk passes two stages; 300 of the 1,000 cached tokens come from Redis over two nodes' networks.
    own = 2 * PREFILL + 2e-3 + step
    load = 1e-3 + 300 * KV_TOKEN / 10e9
    for tier, wait in (("paid", residual / (1 - paid)), ("free", residual / (1 - paid) / (1 - both))):
        assert best.load.ttft_seconds[tier] == pytest.approx(0.02 + 3 * wait + load + own)


def test_kv_tier_and_its_break_even(plan: Plan) -> None:
    tier = plan.kv_tier
    assert tier is not None
    assert tier.chunk_bytes == 256 * 516_096
    assert tier.conversation_bytes == 2_400 * 516_096
    assert tier.longest_bytes == 131_072 * 516_096
    assert tier.write_bytes_s == pytest.approx(3.0 * (1_000 + 400) * KV_TOKEN)
    assert tier.read_bytes_s == pytest.approx(3.0 * 1_000 * 0.3 * KV_TOKEN)
    assert tier.memory_bytes == pytest.approx(3.0 * 1_400 * KV_TOKEN * 0.5 * 1_800 * 1.1)
    assert tier.redis_nodes == math.ceil(tier.memory_bytes / 64e9) == 34
    recompute = (2 * PARAMETERS * 256 + 4 * 126 * 128 * 128 * 256**2 / 2) / 16 / FLOPS + link_seconds(
        256
    )
    assert tier.break_even_bytes_s == pytest.approx(256 * KV_TOKEN / recompute)


def test_kafka_streams_and_edge(plan: Plan) -> None:
    pipe = plan.pipeline
    rate = 3.0 + 1_000 * 12 / 3_600 * 0.1 * 0.5
    requests, _, dispatch, outcomes = pipe.topics
    assert requests.records_s == pytest.approx(rate)
    assert requests.bytes_s == pytest.approx(rate * (2_000 * 4.5 + 1_200))
    assert dispatch.bytes_s == pytest.approx(rate * (2_000 * 6 + 2_000 / 256 * 35 + 1_200))
    assert dispatch.partitions == 3
    month = 720 * 3_600 * 3
    assert outcomes.stored_bytes == pytest.approx(10 / 6 * (2_400 * 4.5 + 1_200) * month)
    assert pipe.stream_appends_s == pytest.approx(rate * 400)
    assert pipe.frames_s == pytest.approx(3.0 * 400)
    assert pipe.edges == 1 + 1


def test_cost(plan: Plan) -> None:
    cost = plan.cost
    assert cost is not None
    assert cost.per_hour == 48 * 3.0
    # Half the peak over a day: 10/6 requests/s, 400 tokens each.
    assert (
        cost.per_million_output == pytest.approx(144 / (10 / 6 * 400 * 3_600 / 1e6)) == pytest.approx(60)
    )


def test_the_document_says_the_same(plan: Plan) -> None:
    text = " ".join(DOCS.read_text(encoding="utf-8").split())
    best, least = plan.sizing.recommended, plan.sizing.minimal
    assert best is not None
    assert least is not None
    assert best.load is not None
    assert plan.kv_tier is not None
    point = best.capacity.point
    assert point is not None
    for number in (
        f"{KV_TOKEN:,}",
        f"{least.room_tokens:,}",
        f"{option(plan, 4, 3).room_tokens:,}",
        f"{least.alone_tpot_seconds * 1e3:.1f} ms",
        f"{PREFILL * 1e3:.1f} ms",
        f"{point.rate:.2f} requests/s",
        f"{best.load.tpot_seconds * 1e3:.1f} ms",
        f"{best.load.ttft_seconds['paid'] * 1e3:.0f} ms",
        f"{plan.kv_tier.break_even_bytes_s / 1e9:.2f} GB/s",
        f"{plan.kv_tier.memory_bytes / 1e12:.2f} TB",
    ):
        assert number in text, number
    given = inputs()
    listed = " ".join(reasons(given.engine(), plan.demand, plan.sizing, given.longest))
    assert re.search(r"12 GPUs hold the weights", listed)
    assert "Why the minimum is not what one deploys" in listed
