"""``python -m workers``: one worker with one engine."""

from __future__ import annotations

import sys
from argparse import Namespace

from infra.role import main as run_role
from infra.role import role_arguments
from infra.settings import Settings, SettingsError
from kv.tier import Tier

from .protocols import Engine
from .worker import Worker, model_path


def main(argv: list[str] | None = None) -> int:
    """Run a worker; returns the process's exit code."""
    parser = role_arguments("Run a worker: an engine that generates the replies dispatched to it.")
    parser.add_argument("--engine", choices=("vllm", "sim"), help="instead of the configured engine")
    parser.add_argument("--pool", help="worker group to join (default: the first model's)")
    parser.add_argument("--sim-ttft-ms", type=float, help="simulated engine: time to first token")
    parser.add_argument("--sim-tpot-ms", type=float, help="simulated engine: time per output token")
    parser.add_argument(
        "--sim-slowdown", type=float, help="simulated engine: slowdown per further request"
    )
    parser.add_argument("--sim-script", help="simulated engine: JSON file (docs/SIM_ENGINE.md)")
    options = parser.parse_args(argv)

    def make(settings: Settings) -> Worker:
        settings = _overridden(settings, options)
        pool = options.pool or next(iter(settings.models.values())).pool
        if pool not in settings.pools:
            raise SettingsError(f"there is no pool {pool}")
        return Worker(settings, pool, _engine(settings, pool), options.index)

    return run_role("worker", options, make)


def _overridden(settings: Settings, options: Namespace) -> Settings:
    given = {
        "ttft_ms": options.sim_ttft_ms,
        "tpot_ms": options.sim_tpot_ms,
        "slowdown_per_request": options.sim_slowdown,
        "script": options.sim_script,
    }
    sim = settings.worker.sim.model_copy(update={k: v for k, v in given.items() if v is not None})
    engine = options.engine or settings.worker.engine
    worker = settings.worker.model_copy(update={"sim": sim, "engine": engine})
    return settings.model_copy(update={"worker": worker})


def _engine(settings: Settings, pool: str) -> Engine:
    path = model_path(settings, pool)
    if settings.worker.engine == "sim":
        from .engine_sim import SimEngine
        from .sim_script import ScriptError, load_script

        try:
            load_script(settings.worker.sim.script)
        except ScriptError as error:
            raise SettingsError(f"worker.sim.script: {error}") from None
        return SimEngine(settings.worker.sim, settings.worker.max_seqs)
    from .engine_vllm import VllmEngine  # only here: importing vLLM takes seconds and gigabytes

    context = max(m.context_length for m in settings.models.values() if m.pool == pool)
    return VllmEngine(
        path,
        settings.worker.vllm,
        max_seqs=settings.worker.max_seqs,
        context_length=context,
        tier=_tier(settings, pool),
    )


def _tier(settings: Settings, pool: str) -> Tier | None:
    if not settings.kv.enabled:
        return None
    if settings.kv.redis_url is None:
        raise SettingsError("kv.redis_url: the KV tier needs a Redis")
    name, model = next((n, m) for n, m in settings.models.items() if m.pool == pool)
    return Tier(settings.kv, settings.redis.url, name, model.revision)


if __name__ == "__main__":
    sys.exit(main())
