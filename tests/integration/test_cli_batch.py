"""``headrace batch`` against a gateway and a runner, with the pipeline double behind them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.cli import batch as commands
from infra.cli import main
from infra.settings import DEV_FREE_KEY, Settings
from tests.integration.batch_fixture import BatchSystem, batch_system


@pytest.fixture(scope="module")
def system(
    module_settings: Callable[..., Settings], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BatchSystem]:
    quick = {"lease_seconds": 1.0, "flush_seconds": 0.05}
    folder = tmp_path_factory.mktemp("files")
    with batch_system(module_settings(batch=quick, files={"url": str(folder)})) as made:
        made.start_runner()
        yield made


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_LOOK_SECONDS", 0.05)


def test_prompts_go_in_and_answers_come_out(
    system: BatchSystem, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("one\ntwo\nthree\n")
    at = ["--url", system.gateway.url]
    assert main(["batch", "submit", str(prompts), "--output", str(answers), *at]) == 0
    said = capsys.readouterr()
    batch_id = said.out.strip()
    assert "3 answered and 0 failed of 3" in said.err
    found = {line["custom_id"]: line for line in map(json.loads, answers.read_text().splitlines())}
    assert found.keys() == {"row-1", "row-2", "row-3"}
    assert found["row-1"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello there"
    assert main(["batch", "status", batch_id, *at]) == 0
    assert main(["batch", "results", batch_id, *at]) == 0
    assert capsys.readouterr().out == answers.read_text()


def test_lines_that_failed_are_beside_the_answers_and_in_the_exit_code(
    system: BatchSystem, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
    line = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [
        line | {"custom_id": "a", "body": body},
        line | {"custom_id": "b", "body": body | {"top_p": 9}},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    at = ["--url", system.gateway.url]
    assert main(["batch", "submit", str(source), "--output", str(answers), *at]) == 1
    failed = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in failed] == ["b"]
    assert "1 answered and 1 failed of 2" in capsys.readouterr().err


def test_ctrl_c_leaves_the_batch_running_and_says_how_to_come_back(
    system: BatchSystem,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(json.dumps({"tokens": ["x"], "hold_before": 0}) + "\n")
    system.gateway.double.hold()
    sleep = time.sleep

    def interrupted(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        sleep(seconds)

    at = ["--url", system.gateway.url]
    with monkeypatch.context() as patched:
        patched.setattr(commands.time, "sleep", interrupted)
        assert main(["batch", "submit", str(prompts), "--wait", *at]) == 130
    said = capsys.readouterr()
    batch_id = said.out.strip()
    assert f"headrace batch status {batch_id} --wait" in said.err
    assert main(["batch", "results", batch_id, *at]) != 0
    assert "the batch is " in capsys.readouterr().err
    system.gateway.double.release()
    assert main(["batch", "status", batch_id, "--wait", *at]) == 0
    assert main(["batch", "cancel", batch_id, *at]) != 0
    assert "status 409" in capsys.readouterr().err


def test_what_cannot_be_done_is_one_line(
    system: BatchSystem, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    at = ["--url", system.gateway.url]
    unknown = f"batch_{'0' * 32}"
    for arguments in (
        ["submit", str(empty), *at],
        ["status", unknown, *at],
        ["status", "../models", *at],
        ["status", unknown, "--key", DEV_FREE_KEY, *at],
        ["status", unknown, "--key", "sk-wrong", *at],
        ["status", unknown, "--url", "http://127.0.0.1:1"],
        ["status", unknown, "--url", "nonsense"],
        ["status", unknown, "--data-dir", str(tmp_path / "none")],
    ):
        assert main(["batch", *arguments]) not in (0, None)
        said = capsys.readouterr().err
        assert said.startswith("headrace: "), said
        assert said.count("\n") == 1, said
