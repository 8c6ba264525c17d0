"""GPUs: memory, bandwidth, arithmetic and links, from the makers' data sheets, and a price to be changed."""

from __future__ import annotations

from pydantic import Field

from .models import WeightType
from .parts import Part


class Gpu(Part):
    """One GPU and the node it stands in.

    Attributes:
        name: what it is called in tables.
        memory_gb: as labelled, 10^9 bytes. Cards show a few per cent more, which is left as a reserve.
        bandwidth_gb_s: of its memory.
        bf16_tflops / fp8_tflops: dense, 10^12 operations/s; fp8 0 = none, fp8 weights are computed in BF16.
        link_gb_s: to the other GPUs of its node, in one direction.
        per_node: GPUs of a node; tensor parallelism stays inside.
        price_per_hour: US dollars. No quotation: a round figure to be replaced.
        source: where the figures come from, in words.
    """

    name: str = "custom"
    memory_gb: float = Field(gt=0, le=100_000)
    bandwidth_gb_s: float = Field(gt=0, le=1e6)
    bf16_tflops: float = Field(gt=0, le=1e6)
    fp8_tflops: float = Field(default=0, ge=0, le=1e6)
    link_gb_s: float = Field(gt=0, le=1e6)
    per_node: int = Field(default=8, ge=1, le=1_024)
    price_per_hour: float = Field(ge=0, le=1e6)
    source: str = "given"

    def flops(self, weights: WeightType) -> float:
        """Peak of products with weights of this type, operations/s. int4 weights are widened first."""
        if weights is WeightType.FP8 and self.fp8_tflops:
            return self.fp8_tflops * 1e12
        return self.bf16_tflops * 1e12


def _preset(name: str, source: str, *figures: float) -> Gpu:
    keys = ("memory_gb", "bandwidth_gb_s", "bf16_tflops", "fp8_tflops", "link_gb_s", "price_per_hour")
    return Gpu.model_validate({"name": name, "source": source, **dict(zip(keys, figures, strict=True))})


#: Memory GB, memory GB/s, dense BF16 and fp8 TFLOPS, link GB/s in one direction, US$/hour.
PRESETS = {
    gpu.name: gpu
    for gpu in (
        _preset("a100", "NVIDIA A100 80GB SXM data sheet; NVLink 600 GB/s", 80, 2_039, 312, 0, 300, 2.0),
        _preset("h100", "NVIDIA H100 SXM data sheet; NVLink 900 GB/s", 80, 3_350, 989, 1_979, 450, 3.0),
        _preset("h200", "NVIDIA H200 SXM data sheet; NVLink 900 GB/s", 141, 4_800, 989, 1_979, 450, 3.8),
        _preset(
            "b200",
            "NVIDIA DGX B200 data sheet, an eighth of it; NVLink 1,800 GB/s",
            *(180, 8_000, 2_250, 4_500, 900, 5.5),
        ),
        _preset(
            "l40s",
            "NVIDIA L40S data sheet; PCIe 4.0 x16 in place of NVLink",
            *(48, 864, 362, 733, 32, 1.2),
        ),
    )
}
