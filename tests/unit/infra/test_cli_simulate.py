"""``headrace simulate``: the tables, the files, and one clear line for what cannot be used."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from infra.cli import main
from infra.role import EXIT_CONFIGURATION

SMALL = "overload,seconds=5,workers.count=1,workers.max_seqs=8"


def test_policies_stand_side_by_side_and_everything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    options = ["--load", SMALL, "--policy", "fair", "--policy", "fcfs", "--out", str(out)]
    assert main(["simulate", *options]) == 0
    table = capsys.readouterr().out
    for word in (
        "paid",
        "free",
        "batch",
        "fair",
        "fcfs",
        "TTFT",
        "TPOT",
        "starved",
        "Jain",
        "slots taken",
    ):
        assert word in table
    png = (out / "simulation.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert width > 800
    assert height > 800
    page = (out / "simulation.html").read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page
    assert "<script" not in page
    reports = json.loads((out / "simulation.json").read_text())
    assert [r["policy"] for r in reports] == ["fair", "fcfs"]
    assert reports[0]["tiers"]["paid"]["requests"] == reports[1]["tiers"]["paid"]["requests"] > 0


def test_a_trace_uses_the_tiers_of_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"at_ms": %d, "tier": "free", "tenant": "a", "prompt_tokens": 50, "output_tokens": 5}'
    trace.write_text("\n".join(line % at for at in range(0, 2_000, 100)))
    assert main(["simulate", "--trace", str(trace), "--workers", "1", "--worker", "max_seqs=4"]) == 0
    captured = capsys.readouterr()
    assert "20 requests" in captured.err
    assert "free" in captured.out


def test_workers_with_a_tier_restart_and_the_table_says_what_came_from_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [
        "--load",
        "chat,seconds=30,per_second=1,workers.count=1",
        "--worker",
        "tier_tokens=2000000",
    ]
    assert main(["simulate", *options, "--restart", "15"]) == 0
    table = capsys.readouterr().out
    assert "from tier" in table
    row = next(line for line in reversed(table.splitlines()) if "fair" in line)
    assert float(row.split("│")[7].strip(" %")) > 0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--load", "rush"], "rush"),
        (["--load", "overload,tiers.paid.shar=1"], "tiers.paid.shar"),
        (["--load", "missing.toml"], "missing.toml"),
        (["--load", SMALL, "--worker", "sequences=3"], "sequences"),
        (["--load", SMALL, "--worker", "max_seqs"], "max_seqs"),
        (["--load", SMALL, "--worker", "tier_load_ms=0"], "tier_load_ms"),
        (["--trace", "missing.jsonl"], "missing.jsonl"),
        (["--load", SMALL, "--config", "missing.toml"], "missing.toml"),
        (["--load", SMALL, "--out", "/proc/nowhere"], "/proc/nowhere"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    options: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *options]) == EXIT_CONFIGURATION
    message = [line for line in capsys.readouterr().err.splitlines() if line.startswith("headrace: ")]
    assert len(message) == 1
    assert word in message[0]


@pytest.mark.parametrize(
    "options", [[], ["--load", SMALL, "--trace", "x"], ["--load", SMALL, "--policy", "x"]]
)
def test_wrong_options_are_a_usage_error(options: list[str]) -> None:
    assert main(["simulate", *options]) == 2


def test_no_role_loads_the_drawing_library() -> None:
    import subprocess
    import sys

    roles = (
        "producers.__main__, stages.__main__, workers.__main__, streaming_edge.__main__, infra.cli.root"
    )
    code = f"import sys, {roles}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
