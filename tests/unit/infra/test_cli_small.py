import json
import tomllib
from pathlib import Path

import pytest

from infra.cli import main
from infra.role import EXIT_CONFIGURATION
from infra.settings import development, hash_key, load


def _config(folder: Path, extra: str = "") -> Path:
    raw = development("sim").model_dump(mode="json")
    path = folder / "headrace.toml"
    tiers = "".join(
        f'[tiers.{name}]\nqueue_class = "{t["queue_class"]}"\n' for name, t in raw["tiers"].items()
    )
    path.write_text(f'[models.m]\npath = "builtin:sim"\n{tiers}{extra}')
    return path


def test_a_created_key_works_once_its_block_is_in_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "create", "--tenant", "acme", "--tier", "paid", "--id", "acme-1"]) == 0
    output = capsys.readouterr().out
    key = output.split("shown this once: ")[1].split("\n")[0]
    block = output.split("configuration file:\n")[1]
    assert key not in block
    assert tomllib.loads(block)["keys"][0]["id"] == "acme-1"
    (entry,) = load(_config(tmp_path, block)).keys
    assert (entry.sha256, entry.tenant, entry.tier) == (hash_key(key), "acme", "paid")


def test_two_keys_are_never_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    main(["keys", "create", "--tenant", "a", "--tier", "paid"])
    main(["keys", "create", "--tenant", "a", "--tier", "paid"])
    lines = [line for line in capsys.readouterr().out.split("\n") if "shown this once" in line]
    assert len(set(lines)) == 2


@pytest.mark.parametrize("options", [["--tenant", "a b"], ["--tenant", "a", "--id", 'x"y']])
def test_names_that_cannot_be_in_a_configuration_are_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "create", "--tier", "paid", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_a_good_configuration_is_called_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(_config(tmp_path))]) == 0
    assert "fine (1 models, 3 tiers, 0 keys)" in capsys.readouterr().out


def test_a_bad_configuration_is_one_line_that_names_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _config(tmp_path, "[http]\nprot = 1\n")
    assert main(["config", "check", str(path)]) == EXIT_CONFIGURATION
    assert capsys.readouterr().err == "headrace: configuration: http.prot: is not a known key\n"


def test_status_without_a_stack_says_so_and_fails(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--data-dir", str(data_dir), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    nothing = dict.fromkeys(("url", "ws_url", "config_error", "redis"))
    assert facts == {**nothing, "ready": False, "roles": []}


def test_asking_nobody_is_one_line(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "why?", "--data-dir", str(data_dir)]) == 1
    assert "no stack runs on" in capsys.readouterr().err


def test_stopping_nothing_is_fine(data_dir: Path) -> None:
    assert main(["down", "--data-dir", str(data_dir)]) == 0


def test_an_unknown_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--no-such-option"]) == 2
    assert "no-such-option" in capsys.readouterr().err
