"""Reading inputs: presets with changes, files, and one line that says where a fault is."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.planning.inputs import read_inputs
from infra.planning.models import WeightType
from infra.planning.parts import PlanError

GIVEN: dict[str, str | None] = {"model": "400b", "gpu": "h100"}
FILE = """
model = "llama-3.1-70b"
context = 8192
[gpu]
preset = "h100"
price_per_hour = 2.25
[traffic]
users = 50
reply = 100
[traffic.tiers.only]
share = 1
[assume]
utilisation = 0.5
"""


def test_the_file_in_the_document_can_be_used() -> None:
    text = (Path(__file__).parents[4] / "docs" / "PLANNING.md").read_text(encoding="utf-8")
    made = read_inputs({}, file=("plan.toml", text.split("```toml\n")[1].split("```")[0]))
    assert made.traffic.tiers["paid"].ttft_seconds == 1.0
    assert made.assume.utilisation == 0.6


def test_presets_take_changes_and_say_so() -> None:
    made = read_inputs({"model": "400b,parameters=500B,layers=120", "gpu": "h100,price_per_hour=2.5"})
    assert (made.model.parameters, made.model.layers) == (500e9, 120)
    assert made.gpu.price_per_hour == 2.5
    assert "changed: parameters, layers" in made.model.source


def test_a_model_of_ones_own() -> None:
    own = "custom,parameters=1.5T,active_parameters=60B,experts=128,experts_per_token=4"
    made = read_inputs(
        {**GIVEN, "model": f"{own},layers=90,hidden=8192,heads=64,kv_heads=8,head_size=128"}
    )
    assert made.model.parameters == 1.5e12
    assert made.model.active == 60e9


def test_weights_are_as_released_unless_asked_otherwise() -> None:
    assert read_inputs({**GIVEN, "model": "deepseek-v3"}).engine().weights is WeightType.FP8
    assert read_inputs({**GIVEN, "weights": "int4"}).engine().weights is WeightType.INT4


def test_options_go_over_the_file_and_the_file_over_the_defaults() -> None:
    made = read_inputs({"reply": "200"}, assume=["utilisation=0.6"], file=("plan.toml", FILE))
    assert made.model.name == "llama-3.1-70b"
    assert made.gpu.price_per_hour == 2.25
    assert (made.traffic.users, made.traffic.prompt, made.traffic.reply) == (50, 2_000, 200)
    assert made.assume.utilisation == 0.6
    assert list(made.traffic.tiers) == ["only"]
    assert list(read_inputs({}, ["a,share=2"], file=("plan.toml", FILE)).traffic.tiers) == ["a"]


@pytest.mark.parametrize(
    ("changes", "more", "start"),
    [
        ({"model": None}, {}, "--model: none is given; known: 400b, "),
        ({"model": "400x"}, {}, "--model: '400x' is not known; known: "),
        ({"model": "custom,layers=3"}, {}, "--model: parameters: "),
        ({"model": "400b,kv_heads=3"}, {}, "--model: kv_heads: 128 heads cannot share 3"),
        ({"model": "400b,layers"}, {}, "--model: 'layers': write key=value"),
        ({"model": "400b,active_parameters=1B"}, {}, "--model: experts: give "),
        ({"gpu": "h100,price=3"}, {}, "--gpu: price: is not a known key"),
        ({"gpu": "h100,memory_gb=-1"}, {}, "--gpu: memory_gb: "),
        ({"context": "0"}, {}, "--context: "),
        ({"context": "1000"}, {}, "--context: 1,000 tokens, but "),
        ({"weights": "int3"}, {}, "--weights: "),
        ({"prompt": "x"}, {}, "--prompt: "),
        ({"rate": "nan"}, {}, "--rate: "),
        ({"prefix_hit": "1"}, {}, "--prefix-hit: "),
        ({"ttft_seconds": "0"}, {}, "--ttft: "),
        ({"tpot_ms": "-1"}, {}, "--tpot: "),
        ({}, {"tiers": ["paid,share=0"]}, "--tier paid: share: "),
        ({}, {"tiers": ["share=1"]}, "--tier: 'share=1': write NAME,"),
        ({}, {"tiers": ["b,share=1,queue_class=batch"]}, "--tier: "),
        ({}, {"assume": ["nothing=1"]}, "--assume nothing: is not a known key"),
        ({}, {"assume": ["utilisation=2"]}, "--assume utilisation: "),
        ({}, {"assume": ["workspace_gb=72"]}, "--assume workspace_gb: nothing is left"),
        ({}, {"file": ("p.toml", "x = 1")}, "--file p.toml: x: is not a known key"),
        ({}, {"file": ("p.toml", "x")}, "--file p.toml: "),
        ({}, {"file": ("p.toml", "traffic = 1")}, "--file p.toml: traffic: write a table"),
        ({}, {"file": ("p.toml", "[traffic]\nrate = 0")}, "--file p.toml: traffic.rate: "),
        ({"gpu": None}, {"file": ("p.toml", 'gpu = "h1"')}, "--file p.toml: gpu: 'h1' is not known"),
        ({}, {"file": ("p.toml", "[assume]\nhop_us = -1")}, "--file p.toml: assume.hop_us: "),
    ],
)
def test_a_fault_is_one_line_that_begins_with_where_it_is(
    changes: dict[str, str | None], more: dict[str, object], start: str
) -> None:
    with pytest.raises(PlanError) as raised:
        read_inputs({**GIVEN, **changes}, **more)  # type: ignore[arg-type]
    assert str(raised.value).startswith(start)
    assert "\n" not in str(raised.value)
