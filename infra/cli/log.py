"""The log that commands read: whose it is, and its turns on a shelf, with a progress bar."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ..replay.log_reader import Tally, read_outcomes
from ..replay.shelf import Shelf, open_shelf
from ..replay.turns import Wanted
from ..settings import KafkaSettings, Settings, load
from ..stack.errors import StackError
from ..stack.state import SETTINGS_FILE


def settings_of(config: Path | None, data_dir: Path) -> Settings:
    """The settings of a configuration file, or without one those of the stack on a data folder.

    Raises:
        StackError: no stack has run there.
    """
    path = config if config is not None else data_dir / SETTINGS_FILE
    if config is None and not path.exists():
        raise StackError(f"no stack runs on {data_dir}: headrace up (or give --config)")
    return load(path)


@contextmanager
def shelf_of_log(settings: KafkaSettings, wanted: Wanted) -> Iterator[tuple[Shelf, Tally]]:
    """The wanted turns, once all of the log is read, and what it held."""
    with open_shelf() as shelf:
        yield shelf, asyncio.run(_read(settings, wanted, shelf))


def told(tally: Tally) -> str:
    """What the log held, for people."""
    return (
        f"{tally.kept:,} turns, of {tally.records:,} records "
        f"({tally.unreadable:,} unreadable, {tally.repeated:,} repeated, {tally.gap:,} missing)"
    )


async def _read(settings: KafkaSettings, wanted: Wanted, shelf: Shelf) -> Tally:
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading the log", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return await read_outcomes(settings, wanted, shelf, progress)
