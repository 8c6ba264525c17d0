"""Reading what people give: presets with changes, a TOML file, options; faults say where they come from."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from . import gpus, models
from .parts import Part, PlanError
from .plan import PlanInputs

_TRAFFIC = ("users", "rate", "prompt", "reply", "prefix_hit", "ttft_seconds", "tpot_ms")
_OPTIONS = {"ttft_seconds": "--ttft", "prefix_hit": "--prefix-hit", "tpot_ms": "--tpot"}
_PRESETS: dict[str, Mapping[str, Part]] = {"model": models.PRESETS, "gpu": gpus.PRESETS}


def read_inputs(
    options: Mapping[str, str | None],
    tiers: Iterable[str] = (),
    assume: Iterable[str] = (),
    file: tuple[str, str] | None = None,
) -> PlanInputs:
    """Put options over a file over the defaults, and check the whole.

    Args:
        options: ``model``, ``gpu``, ``weights``, ``kv``, ``context`` and the traffic's, as written; None if
            not given.
        tiers: ``NAME,key=value,...``; they replace the file's or the default tiers.
        assume: ``NAME=VALUE``.
        file: name and text of a TOML file.

    Raises:
        PlanError: names the option, or the file and the key.
    """
    raw, origin = _of_file(*file) if file else ({}, "")
    changed: dict[str, Any] = {"traffic": {}, "assume": {}}
    for key, value in options.items():
        if value is None:
            continue
        if key in _PRESETS:
            changed[key] = _preset(key, f"--{key}", value)
        elif key in _TRAFFIC:
            changed["traffic"][key] = value
        else:
            changed[key] = value
    named = dict(_named(text) for text in tiers)
    if named:
        changed["traffic"]["tiers"] = named
    for text in assume:
        name, value = _pair(text, "--assume")
        changed["assume"][name] = value
    over = dict(changed)
    for key in ("traffic", "assume"):
        below = raw.get(key, {})
        if not isinstance(below, Mapping):
            raise PlanError(f"{origin}: {key}: write a table")
        over[key] = {**below, **changed[key]}
    whole = {**raw, **over}
    for key in _PRESETS:
        if key not in whole:
            known = ", ".join(_PRESETS[key])
            raise PlanError(f"--{key}: none is given; known: {known}; or custom,key=value,...")
    try:
        return PlanInputs.model_validate(whole)
    except ValidationError as error:
        raise PlanError(_fault(error.errors()[0], changed, named, origin)) from None


def _of_file(name: str, text: str) -> tuple[dict[str, Any], str]:
    origin = f"--file {name}"
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{origin}: {error}") from None
    for key, known in _PRESETS.items():
        value = raw.get(key)
        if isinstance(value, str):
            raw[key] = _preset(key, f"{origin}: {key}", value)
        elif isinstance(value, Mapping) and "preset" in value:
            changes = {k: v for k, v in value.items() if k != "preset"}
            raw[key] = _with(_known(known, f"{origin}: {key}.preset", str(value["preset"])), changes)
    return raw, origin


def _preset(key: str, origin: str, text: str) -> dict[str, Any]:
    name, *changes = text.split(",")
    base = {} if name.strip() == "custom" else _known(_PRESETS[key], origin, name.strip())
    return _with(base, dict(_pair(change, origin) for change in changes))


def _with(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A preset with changes, which its source then names."""
    if base and changes and "source" not in changes:
        changes = {**changes, "source": f"{base['source']}; changed: {', '.join(changes)}"}
    return {**base, **changes}


def _known(presets: Mapping[str, Part], origin: str, name: str) -> dict[str, Any]:
    found = presets.get(name.lower())
    if found is None:
        raise PlanError(f"{origin}: {name[:80]!r} is not known; known: {', '.join(presets)}, custom")
    return found.model_dump()


def _named(text: str) -> tuple[str, dict[str, str]]:
    name, *changes = text.split(",")
    if not name.strip() or "=" in name:
        raise PlanError(f"--tier: {text[:80]!r}: write NAME,share=0.3,key=value,...")
    return name.strip(), dict(_pair(change, f"--tier {name.strip()}") for change in changes)


def _pair(text: str, origin: str) -> tuple[str, str]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals and value):
        raise PlanError(f"{origin}: {text[:80]!r}: write key=value")
    return key, value


def _fault(
    first: ErrorDetails, changed: Mapping[str, Any], named: Mapping[str, Any], origin: str
) -> str:
    """The first fault as one line that begins with the option, or with the file and the key."""
    what = "is not a known key" if first["type"] == "extra_forbidden" else first["msg"]
    what = what.removeprefix("Value error, ")
    match [str(part) for part in first["loc"]]:
        case []:
            where = [origin] if origin else []
        case ["traffic"] if named:
            where = ["--tier"]
        case ["traffic", "tiers", name, *rest] if name in named:
            where = [f"--tier {name}", *rest]
        case ["traffic", key, *_] if key in changed["traffic"] and key != "tiers":
            where = [_OPTIONS.get(key, f"--{key}")]
        case ["assume", key, *_] if key in changed["assume"]:
            where = [f"--assume {key}"]
        case [key, *rest] if key in changed and key not in ("traffic", "assume"):
            where = [f"--{key}", *rest]
        case place:
            where = [origin, ".".join(place)]
    return ": ".join([*where, what])
