"""The sizes a plan arrives at: never below what is needed, and moving the right way with each input."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.tiers import QueueClass
from infra.planning.capacity import Replica
from infra.planning.demand import demand_of
from infra.planning.kv_tier import size_kv_tier
from infra.planning.memory import Shape
from infra.planning.pipeline import size_pipeline
from infra.planning.plan import PlanInputs
from infra.planning.reasons import reasons
from infra.planning.sizing import Sizing, size
from tests.planning import inputs

SHORT = {"pp_most": 2}


def sizing(given_inputs: PlanInputs) -> Sizing:
    demand = demand_of(given_inputs.traffic, given_inputs.assume)
    return size(given_inputs.engine(), demand, given_inputs.longest)


def gpus(model: str = "llama-3.1-70b", gpu: str = "h100", **more: Any) -> int:
    best = sizing(inputs(model, gpu, assume=SHORT, **more)).recommended
    assert best is not None
    return best.total_gpus


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "deepseek-v3"]),
    st.sampled_from(["a100", "h100", "h200", "b200", "l40s"]),
    st.floats(0.1, 200),
    st.integers(1, 8_000),
    st.integers(1, 2_000),
)
def test_recommended_serves_the_load_within_memory_and_targets(
    model: str, gpu: str, rate: float, prompt: int, reply: int
) -> None:
    traffic = {"rate": rate, "prompt": prompt, "reply": reply}
    asked = inputs(model, gpu, traffic=traffic, assume=SHORT)
    found = sizing(asked)
    best, least = found.recommended, found.minimal
    if best is None:
        return
    assert least is not None
    assert least.starts
    assert least.shape.gpus <= best.shape.gpus <= best.total_gpus
    assert found.weights_only <= found.divided
    assert best.capacity.point is not None
    assert best.load is not None
    assert best.needed * best.capacity.point.rate * asked.assume.utilisation >= rate * 0.9 * (1 - 1e-6)
    assert best.total == best.needed + 1
    assert best.load.rate == pytest.approx(rate * 0.9 / best.needed, rel=1e-6)
    assert best.capacity.point.running <= best.capacity.fits
    assert best.load.running <= best.capacity.point.running + 1e-6
    assert best.load.tpot_seconds <= 0.1
    assert best.load.ttft_seconds["paid"] <= 2
    assert best.load.ttft_seconds["paid"] <= best.load.ttft_seconds["free"] <= 10


@settings(max_examples=15, deadline=None)
@given(st.floats(0.1, 50), st.floats(1, 5))
def test_more_load_never_takes_fewer_gpus(rate: float, times: float) -> None:
    assert gpus(traffic={"rate": rate}) <= gpus(traffic={"rate": rate * times})


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"traffic": {"rate": 20, "prefix_hit": 0.8}}, {"traffic": {"rate": 20, "prefix_hit": 0.0}}),
        ({"traffic": {"rate": 20, "tpot_ms": 100}}, {"traffic": {"rate": 20, "tpot_ms": 25}}),
        ({"traffic": {"rate": 20, "reply": 200}}, {"traffic": {"rate": 20, "reply": 1_000}}),
        ({"weights": "fp8", "traffic": {"rate": 20}}, {"weights": "bf16", "traffic": {"rate": 20}}),
    ],
)
def test_harder_work_takes_more_gpus(less: dict[str, Any], more: dict[str, Any]) -> None:
    assert gpus(**less) < gpus(**more)


def test_a_longer_context_raises_the_minimum() -> None:
    def least(context: int) -> int:
        found = sizing(inputs("llama-3.1-70b", "h100", context=context)).minimal
        assert found is not None
        return found.shape.gpus

    assert least(4_096) == 4
    # 131 GB of weights and a million tokens of 327,680 bytes are more than 4 x 69 GB.
    assert least(1_000_000) == 8


def test_fp8_kv_doubles_the_room() -> None:
    full, half = (sizing(inputs("llama-3.1-70b", kv=kv, assume=SHORT)) for kv in ("bf16", "fp8"))
    rooms = [{o.shape: o.room_tokens for o in found.options} for found in (full, half)]
    for shape, room in rooms[0].items():
        assert rooms[1][shape] == pytest.approx(2 * room, abs=32)


def test_spare_replicas_are_on_top() -> None:
    spares = {n: inputs("llama-3.1-8b", assume={**SHORT, "spare_replicas": n}) for n in (0, 2)}
    none, two = (sizing(asked).recommended for asked in spares.values())
    assert none is not None
    assert two is not None
    assert (two.total - two.needed, none.total - none.needed) == (2, 0)


def test_priority_lets_paid_requests_pass_and_free_ones_wait() -> None:
    asked = inputs("llama-3.1-8b", traffic={"rate": 10, "prompt": 8_000, "prefix_hit": 0})
    replica = Replica(asked.engine(), Shape(1, 1), demand_of(asked.traffic, asked.assume).peak)
    near = replica.at(40)
    assert near.ttft_seconds["paid"] < near.ttft_seconds["free"]
    # Where prefills cannot keep up, the lower class waits for ever, which is said and not hidden.
    short = inputs("llama-3.1-8b", traffic={"rate": 10, "reply": 2, "prefix_hit": 0})
    over = Replica(short.engine(), Shape(1, 1), demand_of(short.traffic, short.assume).peak)
    assert over.at(200).ttft_seconds["free"] == float("inf")


def test_batch_work_is_planned_by_the_mean_and_needs_replicas_only_when_it_does_not_fit_beside() -> None:
    def tiers(batch: float) -> dict[str, Any]:
        waiting = {"share": 1.0}
        return {"paid": waiting, "batch": {"share": batch, "queue_class": QueueClass.BATCH}}

    def with_batch(batch: float) -> int:
        return gpus(traffic={"rate": 10 * (1 + batch), "tiers": tiers(batch)})

    assert with_batch(0.01) == with_batch(0.5)
    assert with_batch(5) > with_batch(0.5)


def test_when_no_shape_keeps_to_the_targets_it_says_which_one_is_missed() -> None:
    asked = inputs(traffic={"tpot_ms": 20})
    demand = demand_of(asked.traffic, asked.assume)
    found = size(asked.engine(), demand, asked.longest)
    assert found.minimal is not None
    assert found.recommended is None
    last = reasons(asked.engine(), demand, found, asked.longest)[-1]
    assert "TPOT target 20 ms" in last


def test_a_slow_network_makes_recomputing_right() -> None:
    asked = inputs(assume={"kv_gb_s_per_node": 1.0})
    tier = size_kv_tier(asked.engine(), Shape(8, 2), demand_of(asked.traffic, asked.assume), 131_072)
    assert tier.replica_bytes_s == 2e9 < tier.break_even_bytes_s
    # At 2 of the 3.6 GB/s only very long prefixes win, because attention makes them dearer to compute.
    assert tier.least_tokens is None or tier.least_tokens > 65_536
    fast = inputs(assume={"kv_gb_s_per_node": 5.0})
    tier = size_kv_tier(fast.engine(), Shape(8, 2), demand_of(fast.traffic, fast.assume), 131_072)
    assert tier.least_tokens == 256


@settings(max_examples=50)
@given(st.floats(0.01, 1e5), st.integers(1, 100_000), st.integers(1, 100_000), st.integers(1, 2_000))
def test_what_surrounds_the_gpus_grows_with_the_load(
    rate: float, prompt: int, reply: int, workers: int
) -> None:
    asked = inputs(traffic={"rate": rate, "prompt": prompt, "reply": reply}, context=200_000)
    demand = demand_of(asked.traffic, asked.assume)
    pipe = size_pipeline(asked.assume, demand, workers)
    twice = inputs(traffic={"rate": 2 * rate, "prompt": prompt, "reply": reply}, context=200_000)
    more = size_pipeline(asked.assume, demand_of(twice.traffic, asked.assume), workers)
    for one, other in zip(pipe.topics, more.topics, strict=True):
        assert other.bytes_s == pytest.approx(2 * one.bytes_s)
        assert 1 <= one.partitions <= other.partitions
    assert next(t for t in pipe.topics if t.name == "dispatch.*").partitions == workers
    assert pipe.edges <= more.edges
    assert pipe.stream_redis <= more.stream_redis
    assert pipe.edges * asked.assume.edge_sockets >= demand.users
