"""``headrace plan``: how many GPUs, and everything around them (docs/PLANNING.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Any

import click
from rich.console import Console

from infra.planning import gpus, models
from infra.planning.assumptions import Assumptions, describe
from infra.planning.inputs import read_inputs
from infra.planning.make import make_plan
from infra.planning.parts import PlanError
from infra.planning.plan import Plan, PlanInputs
from infra.planning.reasons import reasons

from ..settings import SettingsError
from .plan_tables import tables
from .rows import Rows, page, print_rows

WIDTH = 100
_ALT = "Memory, decode speed, TTFT, contexts, load or recompute, and cost of the plan"


def plan(
    *,
    file: Path | None,
    tiers: Sequence[str],
    assume: Sequence[str],
    as_json: bool,
    out: Path | None,
    presets: bool,
    **options: str | None,
) -> int:
    """Plan, print, and draw if ``out`` is given.

    Raises:
        SettingsError: an input cannot be used; names the option.
    """
    if presets:
        print_presets()
        return 0
    try:
        inputs = read_inputs(options, tiers, assume, _read(file) if file else None)
    except PlanError as error:
        raise SettingsError(str(error)) from None
    made = make_plan(inputs)
    why = reasons(inputs.engine(), made.demand, made.sizing, inputs.longest)
    if as_json:
        click.echo(json.dumps(as_numbers(inputs, made, why), indent=1))
    else:
        print_plan(inputs, made, why)
    if out is not None:
        write_plan(out, inputs, made, why)
    return 0


def as_numbers(inputs: PlanInputs, made: Plan, why: Sequence[str]) -> dict[str, Any]:
    """Everything as plain values; units are in the names, else seconds, bytes and tokens."""
    assumptions = [
        {"name": name, "value": value, "unit": unit, "source": source, "changed": changed}
        for name, value, unit, source, changed in describe(inputs.assume)
    ]
    given = inputs.model_dump(mode="json", exclude={"assume"})
    best, least = made.sizing.recommended, made.sizing.minimal
    answer = {
        "minimal": least and {"gpus": least.shape.gpus, "shape": str(least.shape)},
        "recommended": best
        and {"gpus": best.total_gpus, "shape": str(best.shape), "replicas": best.total},
        "reasons": list(why),
    }
    return {"answer": answer, "inputs": given, **_plain(asdict(made)), "assumptions": assumptions}


def _plain(value: Any) -> Any:
    """JSON has no infinity: what never ends is null."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if value in (float("inf"), float("-inf")) else value


def print_plan(inputs: PlanInputs, made: Plan, why: Sequence[str]) -> None:
    """The reasons first, then the tables, the assumptions last."""
    console = Console(width=max(WIDTH, Console().width), highlight=False, markup=False)
    console.print(_headline(inputs, made), style="bold")
    console.print()
    for number, step in enumerate(why, 1):
        console.print(fill(step, console.width, initial_indent=f"{number}. ", subsequent_indent="   "))
    for table in tables(inputs, made):
        console.print()
        print_rows(console, table, compact=True)


def _headline(inputs: PlanInputs, made: Plan) -> str:
    engine, best, least = inputs.engine(), made.sizing.recommended, made.sizing.minimal
    what = f"{inputs.model.name}, {engine.weights} weights, on {inputs.gpu.name}"
    if least is None:
        return f"{what}: does not fit"
    minimum = f"at least {least.shape.gpus} GPU{'s' * (least.shape.gpus > 1)} ({least.shape})"
    if best is None:
        return f"{what}: {minimum}; no number of GPUs meets the targets"
    return f"{what}: {minimum}; recommended {best.total_gpus} ({best.total} replicas of {best.shape})"


def print_presets() -> None:
    """Models and GPUs that have a name."""
    console = Console(width=max(WIDTH, Console().width), highlight=False, markup=False)
    shapes: list[tuple[str, ...]] = [
        (
            m.name,
            m.source,
            f"{m.parameters / 1e9:,.4g}",
            f"{m.active / 1e9:,.4g}",
            f"{m.layers}",
            f"{m.context:,}",
        )
        for m in models.PRESETS.values()
    ]
    print_rows(
        console,
        Rows("Models", 2, ("name", "source", "10^9", "active", "layers", "context"), shapes),
        compact=True,
    )
    cards: list[tuple[str, ...]] = [
        (
            g.name,
            g.source,
            f"{g.memory_gb:g}",
            f"{g.bandwidth_gb_s:,.0f}",
            f"{g.bf16_tflops:,.0f}",
            f"{g.price_per_hour:g}",
        )
        for g in gpus.PRESETS.values()
    ]
    print_rows(
        console, Rows("GPUs", 2, ("name", "source", "GB", "GB/s", "TFLOPS", "$/h"), cards), compact=True
    )
    for what, kind in (("--model", models.Model), ("--gpu", gpus.Gpu), ("--assume", Assumptions)):
        click.echo(fill(f"{what} can change {', '.join(kind.model_fields)}", console.width))


def write_plan(folder: Path, inputs: PlanInputs, made: Plan, why: Sequence[str]) -> None:
    """Write ``plan.json``, ``plan.png`` and ``plan.html``.

    Raises:
        SettingsError: the folder cannot be written to.
    """
    from .plan_draw import draw

    title = f"headrace plan: {_headline(inputs, made)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        numbers = json.dumps(as_numbers(inputs, made, why), indent=1)
        (folder / "plan.json").write_text(numbers, encoding="utf-8")
        picture = draw(inputs, made, title)
        (folder / "plan.png").write_bytes(picture)
        shown = page(title, picture, _ALT, tables(inputs, made), why)
        (folder / "plan.html").write_text(shown, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--out: {folder}: {error.strerror}") from None
    click.echo(f"written: {folder}/plan.html, .png and .json", err=True)


def _read(path: Path) -> tuple[str, str]:
    try:
        return str(path), path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingsError(f"--file {path}: {reason}") from None
