"""``headrace export`` from a real broker, whose log holds what logs hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from contracts.entries import Accepted, Terminal, Text
from contracts.stream_ids import StreamId
from contracts.tiers import FinishReason, Status
from infra.cli import main
from infra.cli.export import export
from infra.replay.recordings import read_recordings
from infra.replay.turns import Wanted
from infra.settings import Settings
from infra.stack.errors import StackError
from infra.stream_redis import RedisTokenStreams, connect
from tests.outcome_log import lose_the_tail, publish_outcomes
from tests.unit.infra.test_export_turns import outcome


@dataclass
class Log:
    """The outcomes topic of these settings, and the command that reads it."""

    settings: Settings
    folder: Path

    async def export(self, wanted: Wanted, *, redact: bool = False, streams: bool = False) -> str:
        config, out = self.folder / "headrace.json", self.folder / "out.jsonl"
        config.write_text(self.settings.model_dump_json())
        code = await asyncio.to_thread(
            lambda: export(
                config=config,
                data_dir=self.folder,
                output=out,
                wanted=wanted,
                redact=redact,
                streams=streams,
            )
        )
        assert code == 0
        return out.read_text()


@pytest.fixture
def log(settings: Callable[..., Settings], tmp_path: Path) -> Log:
    return Log(settings(), tmp_path)


async def test_the_log_s_conversations_each_turn_once_O1(
    log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [outcome(1, "a"), outcome(2), outcome(3, "a"), outcome(1, "a")]
    values = [one.encode() for one in outcomes]
    values[2:2] = [b"no json", values[0][: len(values[0]) // 2], b"{}", b'{"schema_version": 999}']
    await publish_outcomes(log.settings, values)
    text = await log.export(Wanted())
    found = [json.loads(line) for line in text.splitlines()]
    assert [(c["id"], len(c["turns"])) for c in found] == [("a", 2), (outcomes[1].request_id, 1)]
    assert found[0]["turns"][1]["choices"][0]["text"] == "Answer 3"
    said = capsys.readouterr().err
    assert "2 conversations with 3 turns, of 8 records (4 unreadable, 1 repeated, 0 missing)" in said
    assert await log.export(Wanted()) == text
    masked = await log.export(Wanted(conversation="a"), redact=True)
    assert "Answer" not in masked
    assert len(masked.splitlines()) == 1


async def test_parts_of_the_log_by_partition_and_offset(log: Log) -> None:
    for partition, first in ((0, 0), (1, 10)):
        values = [outcome(first + n).encode() for n in range(5)]
        await publish_outcomes(log.settings, values, partition)

    async def found(offsets: dict[int, tuple[int, int | None]]) -> list[int]:
        lines = (await log.export(Wanted(offsets=offsets))).splitlines()
        return [json.loads(line)["turns"][0]["created_ms"] - 1_000_000 for line in lines]

    assert await found({0: (1, 3)}) == [1, 2, 3]
    assert await found({1: (3, None), 0: (0, 0)}) == [0, 13, 14]
    assert await found({0: (4, 900)}) == [4]
    assert await found({0: (7, None), 1: (3, 2)}) == []
    with pytest.raises(StackError, match="partitions 0 to 1, and no 2"):
        await found({2: (0, None)})


async def test_what_the_broker_does_not_give_is_counted(
    log: Log, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await publish_outcomes(log.settings, [outcome(1).encode()])
    lose_the_tail(monkeypatch, 2)
    monkeypatch.setattr("infra.replay.log_reader._SILENCE_SECONDS", 0.5)
    assert len((await log.export(Wanted())).splitlines()) == 1
    assert "1 turns, of 1 records (0 unreadable, 0 repeated, 4 missing)" in capsys.readouterr().err


async def test_replies_as_they_were_streamed_where_redis_still_has_them(
    log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [outcome(n, ttft_ms=50, duration_ms=150) for n in (1, 2, 3)]
    await publish_outcomes(log.settings, [one.encode() for one in outcomes])
    kept, still_open = (one.request_id for one in outcomes[:2])
    client = connect(log.settings.redis)
    streams = RedisTokenStreams(client, log.settings.streams)
    for request_id in (kept, still_open):
        await streams.create(request_id, Accepted(tenant="t1", tier="paid", model="m", created_ms=1))
        await streams.append(
            [(request_id, StreamId(1, n), Text(piece, (n,))) for n, piece in enumerate("abc", 1)]
        )
    done = Terminal(status=Status.COMPLETED, finish_reasons=[FinishReason.STOP])
    await streams.seal(kept, done)
    await client.aclose()
    read = read_recordings((await log.export(Wanted(), streams=True)).splitlines())
    assert (read.unreadable, read.incomplete) == (0, 0)
    assert [one.request_id for one in read.found] == [one.request_id for one in outcomes]
    texts = [
        [(at_ms, i.entry.text) for at_ms, i in one.entries if isinstance(i.entry, Text)]
        for one in read.found
    ]
    assert texts[0] == [(50, "a"), (83, "b"), (116, "c")]
    assert texts[1] == [(50, "Answer"), (100, " 2")]
    assert texts[2] == [(50, "Answer"), (100, " 3")]
    assert "3 replies (1 as they were streamed" in capsys.readouterr().err
    hidden = await log.export(Wanted(), streams=True, redact=True)
    assert "Answer" not in hidden
    assert '"t1"' not in hidden


@pytest.mark.parametrize("parts", [["1"], ["1:2"], ["a:1-2"], ["1:-2"], ["0:1-2", "0:5-6"]])
def test_offsets_that_cannot_be_read_are_refused(
    parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *(text for part in parts for text in ("--offsets", part))]) == 2
    assert "PARTITION:FIRST-LAST" in capsys.readouterr().err


def test_a_broker_that_is_away_is_one_line(tmp_path: Path, settings: Callable[..., Settings]) -> None:
    config = tmp_path / "headrace.json"
    config.write_text(settings(kafka={"bootstrap": "127.0.0.1:1"}).model_dump_json())
    for where in ({"config": config}, {"config": None}):
        with pytest.raises(StackError) as refused:
            export(data_dir=tmp_path, output=None, wanted=Wanted(), redact=False, **where)
        assert "\n" not in str(refused.value)
