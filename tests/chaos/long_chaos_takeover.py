"""Workers that wake in the middle of other workers' replies; ``make takeover`` runs this.

``make test`` has no time for it: there, one frozen worker (``test_worker_process.py``) and the proof that a
worker without a fence is noticed (``test_chaos_short.py``) show the same.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from .run import OVERLAP, Options, run

pytestmark = pytest.mark.timeout(300)


async def test_workers_that_wake_after_a_takeover_change_nothing(tmp_path: Path) -> None:
    """Frozen for longer than their leases, they wake while others go on with their replies (I8)."""
    options = Options(tmp_path / "woken" / "data", seconds=14, requests=50, seed=9, faults=3)
    report = await run(replace(options, **OVERLAP))
    assert not report.violations, report.as_text()
    assert report.takeovers, report.as_text()
