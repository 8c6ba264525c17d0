"""``headrace export``: conversations from the log as JSON lines."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import Progress

from ..replay.log_reader import Tally, read_outcomes
from ..replay.shelf import Shelf, open_shelf
from ..replay.turns import Wanted, conversation_object
from ..settings import KafkaSettings, load
from ..stack.errors import StackError
from ..stack.state import SETTINGS_FILE


def export(
    *,
    config: Path | None,
    data_dir: Path,
    output: Path | None,
    wanted: Wanted,
    redact: bool,
) -> int:
    """Write the conversations of the log, one a line, to ``output`` or to standard output."""
    logging.basicConfig(level="CRITICAL")
    settings = load(config if config is not None else _of_stack(data_dir)).kafka
    with open_shelf() as shelf:
        tally = asyncio.run(_read(settings, wanted, shelf))
        try:
            if output is None:
                count = _write(shelf, sys.stdout, redact=redact)
            else:
                with output.open("w", encoding="utf-8") as file:
                    count = _write(shelf, file, redact=redact)
        except OSError as error:
            raise StackError(f"{output}: {error.strerror}") from None
    print(
        f"{count:,} conversations with {tally.kept:,} turns, of {tally.records:,} records "
        f"({tally.unreadable:,} unreadable, {tally.repeated:,} repeated, {tally.gap:,} missing)",
        file=sys.stderr,
    )
    return 0


def unix_ms(text: str) -> int:
    """A time in ISO 8601 as Unix milliseconds; UTC where it names no zone.

    Raises:
        ValueError: it is none.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


def _of_stack(data_dir: Path) -> Path:
    path = data_dir / SETTINGS_FILE
    if not path.exists():
        raise StackError(f"no stack runs on {data_dir}: headrace up (or give --config)")
    return path


async def _read(settings: KafkaSettings, wanted: Wanted, shelf: Shelf) -> Tally:
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading the log", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return await read_outcomes(settings, wanted, shelf, progress)


def _write(shelf: Shelf, file: IO[str], *, redact: bool) -> int:
    count = 0
    for tenant, conversation, turns in shelf.conversations():
        shown = conversation_object(conversation, tenant, turns, redact=redact)
        file.write(json.dumps(shown, ensure_ascii=False) + "\n")
        count += 1
    return count
