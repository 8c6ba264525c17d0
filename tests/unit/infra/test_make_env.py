from pathlib import Path

import pytest

from infra.setup import make_env
from infra.setup.make_env import Environment, SetupError, drop_mismatched_extras, last_error


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    lock = tmp_path / "a.lock"
    lock.write_text("a==1\n")
    made = Environment(tmp_path / "venv", lock)
    made.python.parent.mkdir(parents=True)
    made.python.write_text("#!/bin/sh\nexit 0\n")
    made.python.chmod(0o755)
    return made


def test_a_finished_environment_is_current_until_its_lock_changes(environment: Environment) -> None:
    assert not environment.is_current()
    environment.finish()
    assert environment.is_current()
    environment.lock.write_text("a==2\n")
    assert not environment.is_current()


def test_an_environment_without_its_interpreter_is_not_current(environment: Environment) -> None:
    environment.finish()
    environment.python.unlink()
    assert not environment.is_current()


def test_an_interrupted_run_leaves_no_stamp(environment: Environment) -> None:
    environment.finish()
    (environment.folder / "bin" / "pip").write_text("")
    environment.create()
    assert not environment.is_current()


def test_a_failing_pip_is_one_line_with_its_reason(environment: Environment) -> None:
    environment.python.write_text("#!/bin/sh\necho noise >&2; echo 'ERROR: no match' >&2; exit 1\n")
    with pytest.raises(SetupError, match=r"^pip install failed: no match$"):
        environment.install_lock()
    with pytest.raises(SetupError, match=r"^configure the index$"):
        environment.install("x", otherwise="configure the index")


def test_only_companions_that_do_not_import_lose_their_code(environment: Environment) -> None:
    environment.python.write_text('#!/bin/sh\n[ "$2" = "import torchaudio" ]\n')
    packages = environment.folder / "lib" / "python3.11" / "site-packages"
    for name in make_env.TORCH_EXTRAS:
        (packages / name).mkdir(parents=True)
        (packages / f"{name}-1.dist-info").mkdir()
    drop_mismatched_extras(environment)
    assert sorted(p.name for p in packages.iterdir()) == [
        "torchaudio",
        "torchaudio-1.dist-info",
        "torchcodec-1.dist-info",
        "torchvision-1.dist-info",
    ]


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("", "no reason was given"),
        ("WARNING: a\nERROR: b\nhint\n", "b"),
        ("plain\n\n", "plain"),
    ],
)
def test_the_last_error_is_what_people_are_told(output: str, line: str) -> None:
    assert last_error(output) == line


def test_the_locks_name_no_package_index() -> None:
    for lock in (make_env.PROJECT / "requirements").glob("*.lock"):
        text = lock.read_text()
        assert "index-url" not in text
        assert "find-links" not in text
        assert "://" not in text
