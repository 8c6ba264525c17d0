"""A background response outlives its client, its gateway, the edge and its worker."""

from __future__ import annotations

from pathlib import Path

from tests.integration.responses_scenario import resumed_after_all_died
from tests.stack_process import StackProcess


def test_the_client_s_own_resume_gives_the_stored_text_whatever_died_I1_E4(tmp_path: Path) -> None:
    options = ("--engine", "sim", "--workers", "2", "--sim-ttft-ms", "1", "--sim-tpot-ms", "30")
    with StackProcess(tmp_path / "data", *options) as stack:
        stack.wait_ready(90)
        resumed_after_all_died(stack, 120)
