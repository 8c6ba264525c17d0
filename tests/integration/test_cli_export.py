"""``headrace export`` from a real broker, whose log holds what logs hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.cli.export import export
from infra.kafka import Publisher
from infra.replay.turns import Wanted
from infra.settings import Settings
from infra.stack.errors import StackError
from infra.topics import ensure_topics
from tests.unit.infra.test_export_turns import outcome


async def test_the_log_s_conversations_each_turn_once_O1(
    settings: Callable[..., Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = settings()
    config = tmp_path / "headrace.json"
    config.write_text(made.model_dump_json())
    await ensure_topics(made)
    publisher = Publisher(made.kafka)
    await publisher.start()
    log = [outcome(1, "a"), outcome(2), outcome(3, "a"), outcome(1, "a")]
    values = [one.encode() for one in log]
    values[2:2] = [b"no json", values[0][: len(values[0]) // 2], b"{}", b'{"schema_version": 999}']
    for value in values:
        await publisher.send(made.kafka.topics.outcomes, value, key="k")
    await publisher.stop()

    def run(wanted: Wanted, *, redact: bool = False) -> str:
        out = tmp_path / "out.jsonl"
        where = {"config": config, "data_dir": tmp_path, "output": out}
        assert export(**where, wanted=wanted, redact=redact) == 0  # type: ignore[arg-type]
        return out.read_text()

    text = await asyncio.to_thread(run, Wanted())
    found = [json.loads(line) for line in text.splitlines()]
    assert [(c["id"], len(c["turns"])) for c in found] == [("a", 2), (log[1].request_id, 1)]
    assert found[0]["turns"][1]["choices"][0]["text"] == "Answer 3"
    said = capsys.readouterr().err
    assert "2 conversations with 3 turns, of 8 records (4 unreadable, 1 repeated, 0 missing)" in said
    assert await asyncio.to_thread(run, Wanted()) == text
    masked = await asyncio.to_thread(lambda: run(Wanted(conversation="a"), redact=True))
    assert "Answer" not in masked
    assert len(masked.splitlines()) == 1


def test_a_broker_that_is_away_is_one_line(tmp_path: Path, settings: Callable[..., Settings]) -> None:
    config = tmp_path / "headrace.json"
    config.write_text(settings(kafka={"bootstrap": "127.0.0.1:1"}).model_dump_json())
    for where in ({"config": config}, {"config": None}):
        with pytest.raises(StackError) as refused:
            export(data_dir=tmp_path, output=None, wanted=Wanted(), redact=False, **where)
        assert "\n" not in str(refused.value)
