"""One vLLM for ``bench kv``, in the engine environment: commands on stdin, results on stdout, as JSON lines.

``python -m bench.kv_engine MODEL DTYPE KIND [WHERE]``; KIND is ``plain``, ``tier`` (WHERE: its settings) or
``file`` (WHERE: a folder), which is vLLM's own example connector.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from typing import Any

import psutil

from contracts.records import Sampling
from infra.settings import KvSettings, VllmSettings
from kv.tier import Tier
from workers.engine_vllm import VllmEngine
from workers.protocols import EngineRequest

CONTEXT = 4_608


class _FileEngine(VllmEngine):
    """With vLLM's example connector, which keeps one file for each layer of each prompt."""

    folder = ""

    def _transfer_config(self) -> Any:
        from vllm.config import KVTransferConfig

        return KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": self.folder},
        )


async def main(model: str, dtype: Any, kind: str, where: str) -> None:
    """Serve commands until stdin ends."""
    engine = _engine(model, VllmSettings(dtype=dtype), kind, where)
    await engine.start()
    _say({"ready": True})
    number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        number += 1
        if "prompt" in command:
            _say(await _ask(engine, f"r{number}/1", command["prompt"], command["tokens"]))
        else:
            await engine._llm.reset_prefix_cache()
            _say({"counts": engine.tier_reports.counts})
    await engine.close()


def _engine(model: str, settings: VllmSettings, kind: str, where: str) -> VllmEngine:
    if kind == "file":
        # It stores what the first step of a prompt has computed, and takes that for the whole.
        settings = settings.model_copy(update={"max_batched_tokens": CONTEXT})
        engine = _FileEngine(model, settings, max_seqs=8, context_length=CONTEXT)
        engine.folder = where
        return engine
    tier = None
    if kind == "tier":
        settings_of_tier = KvSettings.model_validate_json(where)
        tier = Tier(settings_of_tier, "redis://127.0.0.1:1/0", "bench", "1")
    return VllmEngine(model, settings, max_seqs=8, context_length=CONTEXT, tier=tier)


async def _ask(engine: VllmEngine, engine_id: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    request = EngineRequest(engine_id, prompt, (), sampling, 0, "bench")
    clock = asyncio.get_running_loop().time
    before, began = _cpu(), clock()
    first = cpu = 0.0
    found: list[int] = []
    cached = 0
    async with aclosing(engine.generate(request)) as deltas:
        async for delta in deltas:
            if not found:
                first, cpu = clock() - began, _cpu() - before
            found += delta.token_ids
            cached = delta.cached_tokens or cached
    return {"ttft": first, "cpu": cpu, "token_ids": found, "cached": cached}


def _cpu() -> float:
    """CPU seconds of this process and the engine's."""
    this = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in (this, *this.children(recursive=True)))


def _say(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], sys.argv[4] if len(sys.argv) > 4 else ""))
