"""Shapes of models: what decides about memory and arithmetic; presets from public model cards."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from .parts import Count, Part


class WeightType(StrEnum):
    """How weights are stored."""

    BF16 = "bf16"
    FP8 = "fp8"
    INT4 = "int4"


class KvType(StrEnum):
    """How the KV cache is stored."""

    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def bytes(self) -> int:
        """Of one number."""
        return 2 if self is KvType.BF16 else 1


class Model(Part):
    """A decoder-only transformer.

    Attributes:
        name: what it is called in tables.
        parameters: all of them.
        active_parameters: those a token is multiplied with; None = all (a dense model).
        layers / hidden / heads: depth, width, query heads.
        kv_heads / head_size: of keys and values, in each layer.
        experts / experts_per_token: routed ones of each layer; 0 = a dense model.
        mla_width: numbers per token and layer that multi-head latent attention keeps in place of keys and
            values (latent rank + rotary part); 0 = ordinary attention.
        context: longest context of the model, tokens.
        released_as: number format of its weights unless another is asked for.
        source: where the shape comes from, in words.
    """

    name: str = "custom"
    parameters: Count
    active_parameters: Count | None = None
    layers: int = Field(ge=1, le=1_000)
    hidden: int = Field(ge=1, le=1_000_000)
    heads: int = Field(ge=1, le=10_000)
    kv_heads: int = Field(ge=1, le=10_000)
    head_size: int = Field(ge=1, le=10_000)
    experts: int = Field(default=0, ge=0, le=100_000)
    experts_per_token: int = Field(default=0, ge=0, le=100_000)
    mla_width: int = Field(default=0, ge=0, le=100_000)
    context: int = Field(default=131_072, ge=1, le=100_000_000)
    released_as: WeightType = WeightType.BF16
    source: str = "given"

    @model_validator(mode="after")
    def _consistent(self) -> Model:
        if self.kv_heads > self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads: {self.heads} heads cannot share {self.kv_heads} KV heads evenly"
            )
        if self.active > self.parameters:
            raise ValueError("active_parameters: more than parameters")
        if (self.active < self.parameters) != (self.experts > 0):
            raise ValueError("experts: give active_parameters, experts and experts_per_token together")
        if self.experts and not 1 <= self.experts_per_token < self.experts:
            raise ValueError(f"experts_per_token: not between 1 and {self.experts - 1}")
        return self

    @property
    def active(self) -> float:
        """Parameters that one token is multiplied with."""
        return self.parameters if self.active_parameters is None else self.active_parameters

    def kv_numbers(self) -> int:
        """Numbers that the cache holds per token: keys and values of each KV head, in each layer."""
        return self.layers * (self.mla_width or 2 * self.kv_heads * self.head_size)

    def read_parameters(self, tokens: float) -> float:
        """Parameters that a step over so many tokens reads, on average, if experts are chosen evenly.

        All that is not an expert, and the experts that at least one token chooses. What the experts hold
        follows from the two counts: total - active = (experts - experts_per_token) x one expert's.
        """
        if not self.experts:
            return self.parameters
        expert = (self.parameters - self.active) / (self.experts - self.experts_per_token)
        missed: float = (1 - self.experts_per_token / self.experts) ** tokens
        return self.parameters - self.experts * expert * missed

    def attention_flops(self) -> float:
        """Operations per pair of a new and an earlier token: scores and weighted sum, over all layers."""
        return 4.0 * self.layers * self.heads * self.head_size


_LLAMA = "Meta's model card and config.json"
_QWEN = "Qwen's model card and config.json"
_MISTRAL = "Mistral AI's model card and config.json"


def _preset(name: str, source: str, *shape: int, parameters: float, **more: float | str) -> Model:
    keys = ("layers", "hidden", "heads", "kv_heads", "head_size", "context")
    fields = dict(zip(keys, shape, strict=True)) | more
    return Model.model_validate({"name": name, "source": source, "parameters": parameters, **fields})


#: Layers, width, heads, KV heads, head size, context.
PRESETS = {
    model.name: model
    for model in (
        _preset(
            "400b",
            "400e9 parameters by definition; the shape is assumed to be that of Llama 3.1 405B",
            *(126, 16_384, 128, 8, 128, 131_072),
            parameters=400e9,
        ),
        _preset("llama-3.1-405b", _LLAMA, 126, 16_384, 128, 8, 128, 131_072, parameters=405.85e9),
        _preset("llama-3.1-70b", _LLAMA, 80, 8_192, 64, 8, 128, 131_072, parameters=70.55e9),
        _preset("llama-3.1-8b", _LLAMA, 32, 4_096, 32, 8, 128, 131_072, parameters=8.03e9),
        _preset("qwen2.5-72b", _QWEN, 80, 8_192, 64, 8, 128, 32_768, parameters=72.7e9),
        _preset("qwen3-32b", _QWEN, 64, 5_120, 64, 8, 128, 32_768, parameters=32.8e9),
        _preset(
            "qwen3-235b-a22b",
            _QWEN,
            *(94, 4_096, 64, 4, 128, 32_768),
            parameters=235e9,
            active_parameters=22e9,
            experts=128,
            experts_per_token=8,
        ),
        _preset(
            "mixtral-8x7b",
            _MISTRAL,
            *(32, 4_096, 32, 8, 128, 32_768),
            parameters=46.7e9,
            active_parameters=12.9e9,
            experts=8,
            experts_per_token=2,
        ),
        _preset(
            "mixtral-8x22b",
            _MISTRAL,
            *(56, 6_144, 48, 8, 128, 65_536),
            parameters=141e9,
            active_parameters=39e9,
            experts=8,
            experts_per_token=2,
        ),
        _preset(
            "deepseek-v3",
            "DeepSeek's technical report and config.json; latent 512 + rotary 64",
            *(61, 7_168, 128, 128, 128, 131_072),
            parameters=671e9,
            active_parameters=37e9,
            experts=256,
            experts_per_token=8,
            mla_width=576,
            released_as="fp8",
        ),
        _preset(
            "smollm2-135m",
            "the demo's model; its config.json",
            *(30, 576, 9, 3, 64, 8_192),
            parameters=134.5e6,
        ),
    )
}
