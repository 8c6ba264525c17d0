"""How long a tier's requests go on without readers, as a file says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.settings import Settings, SettingsError, development, load, parse


def with_grace(value: Any) -> Settings:
    raw = development("sim").model_dump(mode="json")
    raw["tiers"]["paid"]["leave_grace_seconds"] = value
    return parse(raw)


@pytest.mark.parametrize(("value", "meant"), [(0, 0.0), (3600, 3600.0), ("never", None), (None, None)])
def test_a_grace_time_is_seconds_or_never(value: Any, meant: float | None) -> None:
    made = with_grace(value)
    assert made.tiers["paid"].leave_grace_seconds == meant
    assert parse(made.model_dump(mode="json")) == made


@pytest.mark.parametrize("value", [-1, 3601, "soon"])
def test_anything_else_is_an_error_that_names_the_key(value: Any) -> None:
    with pytest.raises(SettingsError, match=r"tiers\.paid\.leave_grace_seconds"):
        with_grace(value)


def test_a_toml_file_can_say_never(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(
        '[models.m]\npath = "builtin:sim"\n[tiers.t]\nqueue_class = "batch"\nleave_grace_seconds = "never"\n'
    )
    assert load(file).tiers["t"].leave_grace_seconds is None
