"""How long prefill and decode take at least: bytes over bandwidth, operations over FLOPS, and the links."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .memory import Engine, Shape

GB = 1e9


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt's prefill.

    Attributes:
        latency_seconds: from its first chunk to its first token, alone on the replica.
        busy_seconds: by which it lengthens the steps of decoding replies, which read the weights anyway.
        chunks: engine steps it takes.
    """

    latency_seconds: float
    busy_seconds: float
    chunks: int


def prefill(engine: Engine, shape: Shape, prompt: float, cached: float = 0.0) -> Prefill:
    """Of a prompt of which the first ``cached`` tokens are in the cache (one token is always computed).

    Each new token is multiplied with the active parameters (2 operations each) and attends to all before
    it: ``sum of positions = (prompt^2 - cached^2) / 2``. A chunk reads the weights once. Stages work on
    successive chunks at the same time, so k chunks take k + stages - 1 turns.
    """
    cached = min(cached, prompt - 1)
    new = prompt - cached
    chunks = math.ceil(new / engine.assume.batched_tokens)
    part = engine.stage_part(shape) / shape.tp
    efficiency = engine.assume.compute_efficiency
    products = 2 * engine.model.active * new / engine.gpu.flops(engine.weights)
    attention = engine.model.attention_flops() * (prompt**2 - cached**2) / 2
    compute = (products + attention / (engine.gpu.bf16_tflops * 1e12)) * part / efficiency
    reads = chunks * weight_read_seconds(engine, shape, new / chunks)
    links = chunks * link_seconds(engine, shape, new / chunks)
    alone = (max(compute, reads) + links) * (chunks + shape.pp - 1) / chunks
    return Prefill(alone + chunks * engine.assume.step_overhead_ms / 1e3, compute + links, chunks)


def decode_step(engine: Engine, shape: Shape, running: float, context: float) -> float:
    """Seconds until each of ``running`` replies, with ``context`` tokens each, has its next token.

    The stages work on as many micro-batches at the same time; a token passes all of them one by one.
    """
    batch = max(1.0, running / shape.pp)
    part = engine.stage_part(shape) / shape.tp
    kv = batch * context * engine.kv_token_bytes_per_gpu(shape)
    read = weight_read_seconds(engine, shape, batch) + kv / _bandwidth(engine)
    products = 2 * engine.model.active / engine.gpu.flops(engine.weights)
    attention = engine.model.attention_flops() * context / (engine.gpu.bf16_tflops * 1e12)
    compute = batch * (products + attention) * part / engine.assume.compute_efficiency
    stage = max(read, compute) + link_seconds(engine, shape, batch)
    return shape.pp * stage + engine.assume.step_overhead_ms / 1e3


def weight_read_seconds(engine: Engine, shape: Shape, tokens: float) -> float:
    """One GPU of the fullest stage reads the weights that so many tokens need."""
    needed = engine.model.read_parameters(tokens) * engine.parameter_bytes
    return needed * engine.stage_part(shape) / shape.tp / _bandwidth(engine)


def link_seconds(engine: Engine, shape: Shape, tokens: float) -> float:
    """One stage's communication: two ring all-reduces a layer, and the way to the next stage.

    Activations are BF16. A ring moves 2 (tp - 1) / tp of them through each link.
    """
    assume = engine.assume
    activations = tokens * engine.model.hidden * 2
    seconds = 0.0
    if shape.tp > 1:
        moved = activations * 2 * (shape.tp - 1) / shape.tp
        link = engine.gpu.link_gb_s * GB * assume.link_efficiency
        layers = math.ceil(engine.model.layers / shape.pp)
        seconds += 2 * layers * (assume.allreduce_us / 1e6 + moved / link)
    if shape.pp > 1:
        seconds += assume.hop_us / 1e6 + activations / (assume.network_gb_s * GB)
    return seconds


def _bandwidth(engine: Engine) -> float:
    return engine.gpu.bandwidth_gb_s * GB * engine.assume.bandwidth_efficiency
