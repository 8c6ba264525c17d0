"""What of a configuration changes while a process runs, and what happens to the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.live_settings import LiveSettings, check_live
from infra.settings import Settings, SettingsError, development, parse


def raw() -> dict[str, Any]:
    made: dict[str, Any] = development("sim").model_dump(mode="json")
    return made


def changed(section: str, **keys: Any) -> Settings:
    other = raw()
    other[section] |= keys
    return parse(other)


def test_keys_tiers_weights_and_the_ladder_can_change() -> None:
    other = raw()
    other["keys"] = []
    other["tiers"]["gold"] = {"queue_class": "interactive", "ttft_target_seconds": 1}
    other["tiers"]["free"]["max_wait_seconds"] = 5
    other["overload"]["enabled"] = False
    other["scheduler"]["ageing_seconds"] = 3
    check_live(development("sim"), parse(other))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("http", "port", 9_000),
        ("kafka", "partitions", 16),
        ("redis", "url", "redis://:secret@elsewhere/0"),
        ("scheduler", "window_per_class", 7),
        ("worker", "max_seqs", 3),
    ],
)
def test_what_is_built_at_the_start_cannot_and_is_named_without_its_value(
    section: str, key: str, value: Any
) -> None:
    with pytest.raises(SettingsError, match=rf"{section}\.{key} cannot change at run time") as caught:
        check_live(development("sim"), changed(section, **{key: value}))
    assert "secret" not in str(caught.value)


def test_models_and_pools_cannot_and_every_key_is_named() -> None:
    other = raw()
    other["models"]["headrace-sim"]["pool"] = "large"
    other["models"]["second"] = {"path": "builtin:sim"}
    other["drain_seconds"] = 1
    with pytest.raises(SettingsError) as caught:
        check_live(development("sim"), parse(other))
    said = str(caught.value)
    assert "models.headrace-sim.pool, models.second, drain_seconds cannot change" in said


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        json.dumps(raw() | {"surprise": 1}),
        json.dumps(
            raw() | {"keys": [], "log_level": "DEBUG"}
        ),  # one key that can change, one that cannot
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing_and_is_said_until_one_can(
    tmp_path: Path, text: str
) -> None:
    live = LiveSettings(development("sim"))
    told: list[Settings] = []
    live.subscribe(told.append)
    file = tmp_path / "headrace.json"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        live.reload(file)
    assert live.current == development("sim")
    assert live.error == str(caught.value)
    assert told == []
    file.write_text(json.dumps(raw() | {"keys": []}))
    live.reload(file)
    assert live.error is None
    assert live.current.keys == []
    assert told == [live.current]


def test_who_is_no_longer_subscribed_is_not_told() -> None:
    live = LiveSettings(development("sim"))
    told: list[Settings] = []
    live.subscribe(told.append)
    live.unsubscribe(told.append)
    live.replace(changed("overload", enabled=False))
    assert told == []
