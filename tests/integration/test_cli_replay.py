"""``headrace replay`` against a gateway, with the pipeline double behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.records import Message, OutcomeChoice
from contracts.tiers import QueueClass
from infra.cli import main
from infra.settings import Settings
from tests.integration.gateway_fixture import Gateway, gateway_in_a_thread
from tests.integration.pipeline_double import script
from tests.outcome_log import publish_outcomes
from tests.unit.infra.test_export_turns import outcome


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


def test_a_part_of_the_log_is_run_again_in_the_batch_class(
    gateway: Gateway,
    settings: Callable[..., Settings],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = settings()
    config = tmp_path / "headrace.json"
    config.write_text(made.model_dump_json())
    turns = [said(tokens=[f"answer {n}"]) for n in range(1, 6)]

    who = [("a", "t1"), ("a", "t1"), ("a", "t2"), (None, "t1"), ("a", "t1")]
    log = [
        outcome(
            n,
            conversation,
            tenant=tenant,
            created_ms=1_000 * n,
            turn=[Message(role="user", content=turns[n - 1])],
            choices=[OutcomeChoice(index=0, text=f"answer {n}")],
        )
        for n, (conversation, tenant) in enumerate(who, 1)
    ]
    lost = outcome(6, turn=[], created_ms=2_500)  # the reaper's outcomes have no messages
    values = [one.encode() for one in (*log, log[1], lost)]
    asyncio.run(publish_outcomes(made, [*values, b"no json", values[0][:50]]))
    options = ["--config", str(config), "--url", gateway.url, "--out", str(tmp_path / "out")]
    chosen = ["--tenant", "t1", "--since", "1970-01-01T00:00:02", "--until", "1970-01-01T00:00:05"]
    assert main(["replay", *options, *chosen, "--recorded-model", "m"]) == 0
    assert "from the log: 3 turns, of 9 records (2 unreadable, 1 repeated" in capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "out" / "replay.jsonl").read_text().splitlines()]
    assert sorted((line["text"], line["similarity"]) for line in lines) == [
        ("answer 2", 1.0),
        ("answer 4", 1.0),
    ]
    ran = {record.turn[-1].content: record for record in gateway.double.records.values()}
    assert set(ran) == {turns[1], turns[3]}
    assert {(record.tier, record.queue_class) for record in ran.values()} == {
        ("batch", QueueClass.BATCH)
    }
    assert main(["replay", *options, "--tenant", "t1", "--service-tier", "default"]) == 0
    ran = {record.turn[-1].content: record for record in gateway.double.records.values()}
    assert [m.content for m in ran[turns[4]].messages] == [
        *(turns[0], "answer 1", turns[1], "answer 2", turns[4])
    ], "in the order of the turns"
    assert {record.tier for record in ran.values()} == {"paid"}
    assert main(["replay", *options, "--tenant", "nobody"]) == 1
    assert main(["replay", str(config), *options, "--tenant", "t1"]) == 2


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
