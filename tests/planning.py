"""What the planning tests share."""

from __future__ import annotations

from typing import Any

from infra.planning.assumptions import Assumptions
from infra.planning.gpus import PRESETS as GPUS
from infra.planning.memory import Engine
from infra.planning.models import PRESETS as MODELS
from infra.planning.models import KvType, Model, WeightType
from infra.planning.plan import PlanInputs


def engine(
    model: str | Model = "400b",
    gpu: str = "h100",
    weights: WeightType = WeightType.BF16,
    kv: KvType = KvType.BF16,
    **assume: float,
) -> Engine:
    shape = MODELS[model] if isinstance(model, str) else model
    return Engine(shape, GPUS[gpu], weights, kv, Assumptions.model_validate(assume))


def inputs(model: str = "400b", gpu: str = "h100", **more: Any) -> PlanInputs:
    return PlanInputs.model_validate({"model": MODELS[model], "gpu": GPUS[gpu], **more})
