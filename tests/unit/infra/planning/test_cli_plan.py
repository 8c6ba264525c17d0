"""``headrace plan``: what is printed, the files, JSON, and the exit code of what cannot be used."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from infra.cli import main
from infra.planning.assumptions import Assumptions
from infra.role import EXIT_CONFIGURATION

SMALL = [
    "plan",
    "--model",
    "llama-3.1-8b",
    "--gpu",
    "l40s",
    "--context",
    "8192",
    "--assume",
    "pp_most=1",
]


def test_prints_the_answer_its_reasons_and_every_assumption(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(SMALL) == 0
    text = capsys.readouterr().out
    assert text.startswith("llama-3.1-8b, bf16 weights, on l40s: at least 1 GPU (TP1); recommended ")
    assert "1. Weights: 8.03e9 parameters x 2 bytes = 16.06 GB." in text
    for name in Assumptions.model_fields:
        assert name in text
    assert "pp_most *" in text
    for title in ("KV tier in Redis", "Kafka", "edge", "per million output tokens", "Long contexts"):
        assert title in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100


def test_writes_picture_page_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert main([*SMALL, "--json", "--out", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "plan.json").read_text())
    assert printed["answer"]["recommended"]["gpus"] >= printed["answer"]["minimal"]["gpus"] == 1
    assert printed["inputs"]["context"] == 8_192
    assert {a["name"]: a["changed"] for a in printed["assumptions"]}["pp_most"] is True
    png = (out / "plan.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) > (1_000, 800)
    page = (out / "plan.html").read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page
    assert "<script" not in page


def test_a_model_that_fits_nowhere_is_an_answer_and_not_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "400b,name=<b>[/x]", "--gpu", "l40s", "--assume", "pp_most=1"]
    assert main(["plan", *options, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("<b>[/x], bf16 weights, on l40s: does not fit\n")
    numbers = json.loads((tmp_path / "plan.json").read_text())
    assert numbers["answer"]["minimal"] is None
    assert "<b>" not in (tmp_path / "plan.html").read_text()


def test_lists_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--presets"]) == 0
    text = capsys.readouterr().out
    for word in ("deepseek-v3", "b200", "utilisation", "price_per_hour"):
        assert word in text


def test_what_cannot_be_used_is_one_line_and_exit_code_78(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--reply", "many"]) == EXIT_CONFIGURATION
    assert capsys.readouterr().err.startswith("headrace: --reply: ")
    assert main([*SMALL, "--file", str(tmp_path / "none.toml")]) == EXIT_CONFIGURATION
    assert capsys.readouterr().err.endswith("No such file or directory\n")
    taken = tmp_path / "file"
    taken.write_text("")
    assert main([*SMALL, "--out", str(taken / "below")]) == EXIT_CONFIGURATION
    assert "headrace: --out: " in capsys.readouterr().err
