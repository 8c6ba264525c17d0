"""``headrace simulate``: scheduling policies side by side, in virtual time (docs/SIMULATOR.md)."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console

from stages.policy import PolicyName, make_policy
from stages.simulation.experiment import Experiment
from stages.simulation.load_spec import (
    LoadError,
    LoadSpec,
    WorkerLoad,
    changed_workers,
    parse_load,
    parse_toml,
)
from stages.simulation.report import Report
from stages.simulation.trace import read_trace

from ..settings import Settings, SettingsError, load
from .rows import page, print_rows
from .simulate_tables import policy_rows, tier_rows

TRACE_DRAIN_MS = 600_000.0

_ALT = "Course of the simulation by tier and policy"


def simulate(
    *,
    load_spec: str | None,
    trace: Path | None,
    policies: Sequence[PolicyName],
    workers: int | None,
    worker_changes: Sequence[str],
    config: Path | None,
    seed: int,
    kills: Sequence[float],
    restarts: Sequence[float],
    out: Path | None,
) -> int:
    """Run every policy over the same requests, print the tables, and draw them if ``out`` is given.

    Raises:
        SettingsError: the load, the trace or the configuration cannot be used; names the key or the line.
    """
    settings = load(config)
    changes = [*worker_changes, *([f"count={workers}"] if workers is not None else [])]
    try:
        if trace is not None:
            experiment = _of_trace(trace, settings, changed_workers(WorkerLoad(), changes))
        else:
            spec = read_load(load_spec or "")
            spec = spec.model_copy(update={"workers": changed_workers(spec.workers, changes)})
            experiment = Experiment.of_load(spec, seed)
    except LoadError as error:
        raise SettingsError(str(error)) from None
    experiment = replace(experiment, deaths=_in_ms(kills), restarts=_in_ms(restarts))
    reports = []
    for name in dict.fromkeys(policies):
        started = time.monotonic()
        with garbage_kept():
            reports.append(experiment.run(name, make_policy, settings))
        requests = sum(tier.requests for tier in reports[-1].tiers.values())
        click.echo(f"{name}: {requests:,} requests in {time.monotonic() - started:.1f} s", err=True)
    print_reports(reports)
    if out is not None:
        write_results(out, reports, trace.name if trace is not None else str(load_spec))
    return 0


def read_load(text: str) -> LoadSpec:
    """A load from a TOML file, or from a preset with changes.

    Raises:
        stages.simulation.load_spec.LoadError: names the key at fault.
    """
    if text.endswith(".toml"):
        return parse_toml(_read(Path(text), "load"))
    return parse_load(text)


def _of_trace(path: Path, settings: Settings, workers: WorkerLoad) -> Experiment:
    lines = _read(path, "trace").splitlines()
    requests = read_trace(lines, settings.tiers, workers.kv_tokens)
    return Experiment.of_trace(requests, settings, workers, TRACE_DRAIN_MS)


def _in_ms(times: Sequence[float]) -> tuple[float, ...]:
    return tuple(seconds * 1000 for seconds in times)


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise LoadError(f"{what}: {path}: {reason}") from None


@contextmanager
def garbage_kept() -> Iterator[None]:
    """No garbage collection meanwhile: a simulation makes no cycles, and looking for them takes time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def print_reports(reports: Sequence[Report]) -> None:
    """The tables, wide enough for their numbers wherever they are printed to."""
    console = Console(width=max(160, Console().width))
    for table in (tier_rows(reports), policy_rows(reports)):
        print_rows(console, table)


def write_results(folder: Path, reports: Sequence[Report], title: str) -> None:
    """Write ``simulation.json``, ``simulation.png`` and ``simulation.html``.

    Raises:
        SettingsError: the folder cannot be written to.
    """
    from .simulate_draw import draw

    try:
        folder.mkdir(parents=True, exist_ok=True)
        numbers = json.dumps([asdict(report) for report in reports], indent=1)
        (folder / "simulation.json").write_text(numbers, encoding="utf-8")
        picture = draw(reports, title)
        (folder / "simulation.png").write_bytes(picture)
        tables = (tier_rows(reports), policy_rows(reports))
        shown = page(f"headrace simulate: {title}", picture, _ALT, tables)
        (folder / "simulation.html").write_text(shown, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--out: {folder}: {error.strerror}") from None
    click.echo(f"written: {folder}/simulation.html, .png and .json")
