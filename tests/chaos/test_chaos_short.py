"""The chaos test in short, and the proof that it notices when the fence does not hold."""

from dataclasses import replace
from pathlib import Path

import pytest

from .run import OVERLAP, Options, run

pytestmark = pytest.mark.timeout(300)


async def test_nothing_is_lost_whatever_dies(tmp_path: Path) -> None:
    """Mixed load; every role is killed, ended and frozen (D5, I1, I5, Q1)."""
    report = await run(Options(tmp_path / "chaos" / "data", seconds=24, requests=100, seed=7, faults=10))
    assert not report.violations, report.as_text()
    assert report.requests >= 100, report.as_text()
    assert sum(number for *_, number in report.faults) >= 8, report.as_text()


async def test_a_worker_without_a_fence_is_noticed(tmp_path: Path) -> None:
    """The same with workers whose late tokens Redis does not refuse must not pass (I8)."""
    options = Options(tmp_path / "broken" / "data", seconds=14, requests=50, seed=9, faults=3)
    report = await run(replace(options, **OVERLAP, break_fence=True))
    assert {v.rule for v in report.violations} >= {"gap or repeat in ids", "unexpected end"}, (
        report.as_text()
    )
