"""The contract of ``workers.protocols.Engine``, on the simulated engine and on vLLM with a real model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from contracts.sim_tokens import sim_token_ids
from infra.embedded import cache_command, free_port
from infra.model_prep import model_dir
from infra.settings import SimSettings
from tests.contract.engine_checks import CHECKS, Bench
from tests.contract.engine_run import run_in_engine
from tests.contract.offload_checks import CHECKS as OFFLOAD_CHECKS
from tests.contract.tier_checks import CHECKS as TIER_CHECKS
from tests.stack_process import engine_problem
from workers.engine_sim import SimEngine


@pytest.fixture
async def sim() -> AsyncIterator[Bench]:
    engine = SimEngine(SimSettings(ttft_ms=2, tpot_ms=1), max_seqs=16, kv_tokens=1_024)
    await engine.start()
    yield Bench(engine, sim_token_ids, 1_024, is_model=False)
    await engine.close()


@pytest.mark.parametrize("name", CHECKS)
async def test_simulated_engine(sim: Bench, name: str) -> None:
    await CHECKS[name](sim)


@pytest.fixture(scope="module")
def vllm_results() -> dict[str, str | None]:
    problem = engine_problem()
    if problem is not None:
        pytest.fail(problem, pytrace=False)
    port = free_port()
    redis = json.dumps(cache_command(port, 512).argv)
    module = "tests.contract.engine_checks"
    return run_in_engine(module, str(model_dir()), redis, str(port), seconds=900)


@pytest.mark.vllm
@pytest.mark.timeout(960)
@pytest.mark.parametrize("name", [*CHECKS, *TIER_CHECKS, *OFFLOAD_CHECKS])
def test_vllm(vllm_results: dict[str, str | None], name: str) -> None:
    assert vllm_results[name] is None, vllm_results[name]
