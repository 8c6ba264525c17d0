"""``headrace replay``: recorded conversations once more, against another model or other settings."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from ..replay.report import figures, line_of, page
from ..replay.runner import ReplayOptions, TurnResult, replay
from ..replay.sources import RecordedConversation, read_conversations, recorded_turn
from ..replay.turns import Wanted
from ..stack.errors import StackError
from ..stack.state import state_to_call
from .log import settings_of, shelf_of_log, told


def run_replay(
    source: Callable[[], list[RecordedConversation]],
    options: ReplayOptions,
    *,
    limit: int | None,
    out: Path,
    url: str | None,
    key: str,
    data_dir: Path,
) -> int:
    """Run the conversations of ``source``, and write ``replay.jsonl`` and ``replay.html`` into ``out``.

    Returns:
        0; 1 where a turn did not complete; 130 after Ctrl-C, when what was done is written all the same.
    """
    if url is None:
        url = state_to_call(data_dir, "--url").url
    conversations = source()[:limit]
    total = sum(len(c.turns) for c in conversations)
    results: list[TurnResult] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / "replay.jsonl").open("w", encoding="utf-8") as lines:
            stopped = _run(conversations, options, url, key, total, results, lines)
        (out / "replay.html").write_text(page(results), encoding="utf-8")
    except OSError as error:
        raise StackError(f"{out}: {error.strerror}") from None
    _show(results)
    print(f"{out / 'replay.html'} and replay.jsonl: every turn, side by side", file=sys.stderr)
    if stopped:
        print(f"stopped: {len(results):,} of {total:,} turns were run", file=sys.stderr)
        return 130
    return int(any(result.outcome != "completed" for result in results))


def conversations_of_file(path: Path) -> list[RecordedConversation]:
    """The conversations of a file.

    Raises:
        StackError: it has none, or cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as file:
            reading = read_conversations(file)
    except (OSError, UnicodeDecodeError) as error:
        raise StackError(f"{path}: {error}") from None
    if reading.unreadable:
        print(f"{path}: {reading.unreadable:,} entries are no conversation", file=sys.stderr)
    if not reading.conversations:
        raise StackError(f"{path} has no conversations (docs/REPLAY.md says which formats are read)")
    return reading.conversations


def conversations_of_log(
    config: Path | None, data_dir: Path, wanted: Wanted
) -> list[RecordedConversation]:
    """The wanted conversations of the log, all of which is read before this returns.

    Raises:
        StackError: there are none, or the log cannot be read.
    """
    logging.basicConfig(level="CRITICAL")
    settings = settings_of(config, data_dir)
    with shelf_of_log(settings.kafka, wanted) as (shelf, tally):
        found = [
            RecordedConversation(name, [turn for turn in map(recorded_turn, turns) if turn.added])
            for _, name, turns in shelf.conversations()
        ]
    print(f"from the log: {told(tally)}", file=sys.stderr)
    conversations = [conversation for conversation in found if conversation.turns]
    if not conversations:
        raise StackError("the log has no conversations like these")
    return conversations


def _run(
    conversations: list[RecordedConversation],
    options: ReplayOptions,
    url: str,
    key: str,
    total: int,
    results: list[TurnResult],
    lines: TextIO,
) -> bool:
    """Whether it was stopped by Ctrl-C."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replaying", total=total)

        def done(result: TurnResult) -> None:
            results.append(result)
            lines.write(json.dumps(line_of(result), ensure_ascii=False) + "\n")
            lines.flush()
            bar.advance(task)

        try:
            asyncio.run(replay(conversations, options, url, key, done))
        except KeyboardInterrupt:
            return True
    return False


def _show(results: list[TurnResult]) -> None:
    table = Table(title="Replay")
    table.add_column("figure")
    for side in ("recorded", "replayed"):
        table.add_column(side, justify="right")
    for row in figures(results):
        table.add_row(row.name, row.recorded, row.replayed)
    Console().print(table)
