from pathlib import Path

import pytest

from infra.stack.process import bound_log, last_words, set_aside
from infra.stack.watchdog import groups_left


def test_only_groups_that_were_not_taken_back_are_killed() -> None:
    assert groups_left(["+10\n", "+11\n", "-10\n", "+12\n"]) == {11, 12}
    assert groups_left(["+10\n", "-10\n"]) == set()


@pytest.mark.parametrize("line", ["", "\n", "+\n", "+x\n", "10\n", "+-1\n", "+1 2\n"])
def test_a_line_that_is_no_message_kills_nothing(line: str) -> None:
    assert groups_left([line]) == set()


def test_a_log_past_its_bound_moves_aside_under_its_writer(tmp_path: Path) -> None:
    log = tmp_path / "edge-0.log"
    with log.open("ab") as writer:
        writer.write(b"x" * 50)
        writer.flush()
        assert not bound_log(log, 100)
        writer.write(b"y" * 51)
        writer.flush()
        assert bound_log(log, 100)
        writer.write(b"later\n")
    assert log.read_bytes() == b"later\n"
    assert (tmp_path / "edge-0.log.1").read_bytes() == b"x" * 50 + b"y" * 51


def test_an_earlier_run_s_log_is_kept_once(tmp_path: Path) -> None:
    log = tmp_path / "edge-0.log"
    set_aside(log)
    log.write_text("first")
    set_aside(log)
    assert not log.exists()
    assert (tmp_path / "edge-0.log.1").read_text() == "first"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ""),
        ("one\nheadrace edge: configuration: no\n\n", "headrace edge: configuration: no"),
        ('{"level": "INFO", "message": "stopped"}\n', "stopped"),
        ("[1]\n", "[1]"),
        ("x" * 5000 + "\n", "x" * 300),
    ],
)
def test_last_words_are_the_last_line_or_a_record_s_message(
    tmp_path: Path, content: str, words: str
) -> None:
    log = tmp_path / "log"
    log.write_text(content)
    assert last_words(log) == words


def test_a_process_without_a_log_said_nothing(tmp_path: Path) -> None:
    assert last_words(tmp_path / "none") == ""
