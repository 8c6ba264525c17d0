"""Weights and KV cache in GPU memory, and how a shape of tensor and pipeline parallelism divides them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .assumptions import Assumptions
from .gpus import Gpu
from .models import KvType, Model, WeightType

GB = 1e9


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Tensor parallel (inside a node) times pipeline parallel (stages)."""

    tp: int
    pp: int

    @property
    def gpus(self) -> int:
        """Of one replica."""
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"TP{self.tp} x PP{self.pp}" if self.pp > 1 else f"TP{self.tp}"


@dataclass(frozen=True, slots=True)
class Engine:
    """One model on one kind of GPU in given number formats: what all arithmetic starts from."""

    model: Model
    gpu: Gpu
    weights: WeightType
    kv: KvType
    assume: Assumptions

    @property
    def parameter_bytes(self) -> float:
        """Of one parameter."""
        return {
            WeightType.BF16: 2.0,
            WeightType.FP8: self.assume.fp8_weight_bytes,
            WeightType.INT4: self.assume.int4_weight_bytes,
        }[self.weights]

    @property
    def weight_bytes(self) -> float:
        """Of the whole model."""
        return self.model.parameters * self.parameter_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Of the cache per token, each number once."""
        return self.model.kv_numbers() * self.kv.bytes

    @property
    def usable_bytes(self) -> float:
        """Of one GPU, for weights and KV cache."""
        whole = self.gpu.memory_gb * self.assume.memory_utilisation
        return max(0.0, whole - self.assume.workspace_gb) * GB

    def stage_part(self, shape: Shape) -> float:
        """Part of the layers in the fullest stage."""
        return math.ceil(self.model.layers / shape.pp) / self.model.layers

    def weight_bytes_per_gpu(self, shape: Shape) -> float:
        """In the fullest stage."""
        return self.weight_bytes * self.stage_part(shape) / shape.tp

    def kv_copies(self, shape: Shape) -> float:
        """How often each number of the cache is held: ranks without a KV head of their own copy one.

        The latent of MLA belongs to all heads, so every tensor-parallel rank holds it.
        """
        return float(shape.tp) if self.model.mla_width else max(1.0, shape.tp / self.model.kv_heads)

    def kv_token_bytes_per_gpu(self, shape: Shape) -> float:
        """Per token, in the fullest stage."""
        return self.kv_token_bytes * self.stage_part(shape) * self.kv_copies(shape) / shape.tp

    def kv_room_tokens(self, shape: Shape) -> int:
        """Tokens of cache a replica has room for, in whole blocks; 0 when not even the weights fit."""
        free = self.usable_bytes - self.weight_bytes_per_gpu(shape)
        block = self.assume.block_tokens
        return max(0, math.floor(free / self.kv_token_bytes_per_gpu(shape) / block)) * block

    def blocks(self, tokens: float) -> int:
        """Tokens rounded up to whole blocks."""
        return math.ceil(tokens / self.assume.block_tokens) * self.assume.block_tokens


def divides(engine: Engine, tp: int) -> bool:
    """Whether heads and KV heads can be dealt out to so many ranks."""
    model = engine.model
    if model.heads % tp or tp > engine.gpu.per_node or engine.gpu.per_node % tp:
        return False
    return bool(model.mla_width) or model.kv_heads % tp == 0 or tp % model.kv_heads == 0


def shapes(engine: Engine) -> list[Shape]:
    """Every shape the model can be cut into: TP inside a node, one stage or more."""
    degrees = [tp for tp in range(1, engine.gpu.per_node + 1) if divides(engine, tp)]
    longest = min(engine.assume.pp_most, engine.model.layers)
    return [Shape(tp, pp) for pp in range(1, longest + 1) for tp in degrees]


def in_whole_nodes(engine: Engine, shape: Shape) -> bool:
    """Whether replicas fill nodes without a rest: a divisor of a node, or whole nodes."""
    node = engine.gpu.per_node
    return node % shape.gpus == 0 or shape.gpus % node == 0
