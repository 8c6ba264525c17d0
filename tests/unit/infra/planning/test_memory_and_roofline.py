"""Memory and time of shapes: known bytes per token, and what must hold whatever the numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.planning.gpus import PRESETS as GPUS
from infra.planning.memory import Shape, in_whole_nodes, shapes
from infra.planning.models import PRESETS as MODELS
from infra.planning.models import KvType, WeightType
from infra.planning.roofline import decode_step, link_seconds, prefill
from tests.planning import engine

NAMES = st.sampled_from(sorted(MODELS))
CARDS = st.sampled_from(sorted(GPUS))
TOKENS = st.integers(1, 1_000_000)


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-3.1-405b", 516_096),
        ("llama-3.1-70b", 327_680),
        ("llama-3.1-8b", 131_072),
        ("mixtral-8x7b", 131_072),
        ("qwen3-235b-a22b", 192_512),
        ("deepseek-v3", 70_272),
        ("smollm2-135m", 23_040),  # as vLLM's own connector wrote it
    ],
)
def test_kv_bytes_per_token(name: str, bytes_per_token: int) -> None:
    assert engine(name).kv_token_bytes == bytes_per_token
    assert engine(name, kv=KvType.FP8).kv_token_bytes * 2 == bytes_per_token


def test_ranks_without_a_kv_head_of_their_own_hold_a_copy() -> None:
    four_heads = engine("qwen3-235b-a22b")
    assert four_heads.kv_token_bytes_per_gpu(Shape(4, 1)) == four_heads.kv_token_bytes / 4
    assert four_heads.kv_token_bytes_per_gpu(Shape(8, 1)) == four_heads.kv_token_bytes / 4
    latent = engine("deepseek-v3")
    assert latent.kv_token_bytes_per_gpu(Shape(8, 1)) == latent.kv_token_bytes


def test_experts_are_read_as_tokens_choose_them() -> None:
    model = MODELS["mixtral-8x7b"]
    assert model.read_parameters(1) == pytest.approx(model.active)
    # Two tokens choose 8 x (1 - (6/8)^2) = 3.5 experts on average.
    expert = (46.7e9 - 12.9e9) / 6
    assert model.read_parameters(2) == pytest.approx(46.7e9 - 8 * expert + 3.5 * expert)
    assert model.read_parameters(10_000) == pytest.approx(model.parameters)
    assert MODELS["400b"].read_parameters(1) == 400e9


@given(NAMES, CARDS, st.sampled_from(WeightType), st.sampled_from(KvType))
def test_what_is_said_to_fit_fits(name: str, gpu: str, weights: WeightType, kv: KvType) -> None:
    on = engine(name, gpu, weights, kv)
    for shape in shapes(on):
        assert on.model.heads % shape.tp == 0
        assert shape.tp <= on.gpu.per_node
        room = on.kv_room_tokens(shape)
        if room:
            held = on.weight_bytes_per_gpu(shape) + room * on.kv_token_bytes_per_gpu(shape)
            assert held <= on.usable_bytes * (1 + 1e-9) <= on.gpu.memory_gb * 1e9
        # No stage can be forgotten: all GPUs together hold every parameter.
        assert on.weight_bytes_per_gpu(shape) * shape.gpus >= on.weight_bytes * (1 - 1e-9)
        if in_whole_nodes(on, shape):
            assert 8 % shape.gpus == 0 or shape.gpus % 8 == 0


@given(NAMES, st.integers(1, 500_000), st.integers(1, 500_000))
def test_more_context_is_more_memory_and_more_time(name: str, tokens: int, more: int) -> None:
    on, shape = engine(name), Shape(1, 1)
    assert on.blocks(tokens) <= on.blocks(tokens + more)
    assert decode_step(on, shape, 8, tokens) < decode_step(on, shape, 8, tokens + more)
    assert prefill(on, shape, tokens).busy_seconds < prefill(on, shape, tokens + more).busy_seconds


@given(NAMES, st.integers(2, 200_000), st.floats(0, 0.99))
def test_a_cached_prefix_never_costs(name: str, prompt: int, part: float) -> None:
    on, shape = engine(name), Shape(1, 1)
    cold, warm = prefill(on, shape, prompt), prefill(on, shape, prompt, prompt * part)
    assert warm.busy_seconds <= cold.busy_seconds * (1 + 1e-9)
    assert warm.chunks <= cold.chunks
    assert 0 < warm.busy_seconds <= warm.latency_seconds


@given(NAMES, st.integers(1, 255))
def test_a_larger_batch_is_slower_but_does_more(name: str, running: int) -> None:
    on, shape = engine(name), Shape(1, 1)
    now, then = (decode_step(on, shape, n, 2_000) for n in (running, running + 1))
    assert now <= then
    assert running / now <= (running + 1) / then


def test_fp8_weights_halve_the_reads_and_a100_computes_them_in_bf16() -> None:
    full, half = (engine("llama-3.1-8b", "a100", w) for w in (WeightType.BF16, WeightType.FP8))
    assert half.weight_bytes * 2 == full.weight_bytes
    assert half.gpu.flops(WeightType.FP8) == 312e12
    assert GPUS["h100"].flops(WeightType.FP8) == 1_979e12
    assert GPUS["h100"].flops(WeightType.INT4) == 989e12


def test_one_gpu_has_no_links() -> None:
    assert link_seconds(engine(), Shape(1, 1), 1_000) == 0


def test_stages_work_on_successive_chunks_at_the_same_time() -> None:
    on = engine(step_overhead_ms=0)
    one, long = (prefill(on, Shape(8, 2), n) for n in (2_048, 64 * 2_048))
    assert one.latency_seconds == pytest.approx(2 * one.busy_seconds)
    assert long.latency_seconds == pytest.approx(long.busy_seconds * 65 / 64)
