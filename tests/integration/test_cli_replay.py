"""``headrace replay`` against a gateway, with the pipeline double behind it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.cli import main
from infra.settings import Settings
from tests.integration.gateway_fixture import Gateway, gateway_in_a_thread
from tests.integration.pipeline_double import script


@pytest.fixture
def gateway(settings: Callable[..., Settings]) -> Iterator[Gateway]:
    with gateway_in_a_thread(settings()) as running:
        yield running


def said(**parts: Any) -> str:
    content: str = script(**parts)[0]["content"]
    return content


@pytest.mark.parametrize("own", [False, True])
def test_turns_are_run_in_order_and_stand_side_by_side(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], own: bool
) -> None:
    log = tmp_path / "log.jsonl"
    turns = [said(tokens=["one"]), said(tokens=["two"])]
    messages = [
        {"role": "user", "content": turns[0]},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": turns[1]},
        {"role": "assistant", "content": "zwei"},
    ]
    failing = {"messages": [{"role": "user", "content": said(fail_after=0)}]}
    log.write_text("".join(json.dumps(line) + "\n" for line in ({"messages": messages}, failing)) + "{")
    arguments = [str(log), "--url", gateway.url, "--out", str(tmp_path / "out"), "--temperature", "0.5"]
    assert main(["replay", *arguments, *(["--own-replies"] if own else [])]) == 1
    shown = capsys.readouterr()
    assert "1 entries are no conversation" in shown.err
    assert "1 of 2" in shown.out
    lines = [json.loads(line) for line in (tmp_path / "out" / "replay.jsonl").read_text().splitlines()]
    by_turn = {(line["conversation"], line["turn"]): line for line in lines}
    first, second = (by_turn["conversation 1", n] for n in (0, 1))
    assert (first["text"], first["similarity"], first["outcome"]) == ("one", 1.0, "completed")
    assert (second["text"], second["similarity"]) == ("two", 0.0)
    assert second["ttft_ms"] > 0
    assert by_turn["conversation 2", 0]["outcome"] == "engine_error"
    assert "zwei" in (tmp_path / "out" / "replay.html").read_text()
    records = [r for r in gateway.double.records.values() if r.turn[-1].content == turns[1]]
    assert [m.content for m in records[0].messages] == [turns[0], "one", turns[1]]
    assert records[0].sampling.temperature == 0.5


def test_what_cannot_be_replayed_is_one_line(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for arguments in ([], ["--url", gateway.url]):
        options = ["--data-dir", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
        assert main(["replay", str(empty), *options, *arguments]) not in (0, None)
        told = capsys.readouterr().err
        assert told.startswith("headrace: ")
        assert told.count("\n") == 1
