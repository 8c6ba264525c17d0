import tomllib
from pathlib import Path

from pydantic import BaseModel

from infra.settings import Settings, load

EXAMPLE = Path(__file__).parents[3] / "infra" / "headrace.example.toml"


def test_the_example_states_every_default_as_it_is() -> None:
    settings = load(EXAMPLE)
    for name in Settings.model_fields:
        default = Settings.model_fields[name].default
        if isinstance(default, BaseModel):
            assert getattr(settings, name) == default, name


def test_the_example_names_every_setting() -> None:
    text = EXAMPLE.read_text()
    raw = tomllib.loads(text)

    def missing(section: BaseModel, keys: dict[str, object], path: str) -> list[str]:
        found = []
        for name in type(section).model_fields:
            value = getattr(section, name)
            if isinstance(value, BaseModel):
                found += missing(value, keys.get(name, {}), f"{path}.{name}")  # type: ignore[arg-type]
            elif name not in keys and f"# {name} = " not in text:
                found.append(f"{path}.{name}")
        return found

    settings = load(EXAMPLE)
    for name in Settings.model_fields:
        if isinstance(section := getattr(settings, name), BaseModel):
            assert not missing(section, raw[name], name)
    model = next(iter(settings.models.values()))
    assert not missing(model, raw["models"]["my-model"], "models")
