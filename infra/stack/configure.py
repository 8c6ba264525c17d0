"""From the options of ``headrace up`` to the settings its roles run with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..embedded import (
    BROKER_FETCH_MAX_WAIT_MS,
    BROKER_PARTITIONS,
    BROKER_SESSION_TIMEOUT_MS,
    BROKER_STALL_SECONDS,
    BROKER_WORKER_SLOTS,
)
from ..model_prep import is_complete, model_dir
from ..settings import BUILTIN_SIM, Settings, development, load, parse
from .errors import StackError

Engine = Literal["vllm", "sim"]


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What ``headrace up`` was asked for; None where nothing was said.

    Attributes:
        kafka: ``host:port`` of a broker to use instead of the embedded one.
        redis: URL of a Redis to use instead of the embedded one.
        model: model folder of the development configuration.
        ask: a question to ask once everything is ready.
    """

    data_dir: Path
    engine: Engine | None = None
    port: int | None = None
    ws_port: int | None = None
    workers: int = 1
    kafka: str | None = None
    redis: str | None = None
    config: Path | None = None
    model: Path | None = None
    sim_ttft_ms: float | None = None
    sim_tpot_ms: float | None = None
    sim_slowdown: float | None = None
    sim_script: Path | None = None
    ask: str | None = None


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where this stack's parts are.

    Attributes:
        cache: the embedded Redis of the KV tier; None = this stack runs none.
    """

    port: int
    ws_port: int
    kafka: str
    redis: str
    doorbells: Path
    cache: str | None = None


def base_settings(options: UpOptions) -> Settings:
    """The configuration file, or the development configuration, with the engine options applied.

    Raises:
        SettingsError: the file cannot be used.
        StackError: the options contradict it, or the model is not there.
    """
    if options.config is not None:
        if options.model is not None:
            raise StackError(
                "--model goes with the development configuration: name it in --config instead"
            )
        raw = load(options.config).model_dump(mode="json")
        if options.engine is not None:
            raw["worker"]["engine"] = options.engine
    else:
        raw = _development(options).model_dump(mode="json")
    sim = {
        "ttft_ms": options.sim_ttft_ms,
        "tpot_ms": options.sim_tpot_ms,
        "slowdown_per_request": options.sim_slowdown,
        "script": str(options.sim_script.resolve()) if options.sim_script else None,
    }
    raw["worker"]["sim"] |= {name: value for name, value in sim.items() if value is not None}
    settings = parse(_with_absolute_paths(raw, options.data_dir))
    for name, model in settings.models.items():
        if model.path != BUILTIN_SIM and not is_complete(Path(model.path)):
            hint = ": run make model" if options.config is None else ""
            raise StackError(f"model {name}: there is no model in {model.path}{hint}")
    return settings


def effective_settings(base: Settings, addresses: Addresses, options: UpOptions) -> Settings:
    """``base`` with this stack's addresses, and what its broker wants."""
    raw = base.model_dump(mode="json")
    raw["kafka"]["bootstrap"] = addresses.kafka
    if options.kafka is None:
        raw["kafka"] |= {
            "fetch_max_wait_ms": BROKER_FETCH_MAX_WAIT_MS,
            "doorbells": str(addresses.doorbells),
            "partitions": BROKER_PARTITIONS,
            "worker_partitions": BROKER_PARTITIONS,
            # A killed worker's slot is taken for a while.
            "worker_slots": max(BROKER_WORKER_SLOTS, 2 * options.workers),
            "session_timeout_ms": BROKER_SESSION_TIMEOUT_MS,
            "stall_seconds": BROKER_STALL_SECONDS,
            "idempotent": False,
        }
    raw["redis"]["url"] = addresses.redis
    if addresses.cache is not None:
        raw["kv"]["redis_url"] = addresses.cache
    raw["http"]["port"] = addresses.port
    raw["edge"]["port"] = addresses.ws_port
    return parse(raw)


def reachable_host(host: str) -> str:
    """The host to put into a URL for a server that listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)  # noqa: S104


def _development(options: UpOptions) -> Settings:
    engine: Engine = options.engine or "vllm"
    if options.model is not None:
        return development(engine, str(options.model.resolve()))
    return development(engine, BUILTIN_SIM if engine == "sim" else str(model_dir()))


def _with_absolute_paths(raw: dict[str, Any], data_dir: Path) -> dict[str, Any]:
    """Roles read the settings from another file, so paths in them must not depend on the place."""
    for model in raw["models"].values():
        if model["path"] != BUILTIN_SIM:
            model["path"] = str(Path(model["path"]).resolve())
    script = raw["worker"]["sim"]["script"]
    if script is not None:
        raw["worker"]["sim"]["script"] = str(Path(script).resolve())
    files = raw["files"]["url"]
    if files is None:
        raw["files"]["url"] = str(data_dir.resolve() / "files")
    elif "://" not in files:
        raw["files"]["url"] = str(Path(files).resolve())
    return raw
