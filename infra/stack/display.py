"""What ``headrace up`` shows: one line per process on a terminal, a line per change elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .state import ProcessState, StackState


class Display(Protocol):
    """Shows the stack to the person who started it."""

    def update(self, state: StackState) -> None:
        """Something of the state has changed."""

    def note(self, text: str) -> None:
        """Say one line."""

    def close(self) -> None:
        """Nothing more comes."""


def state_word(process: ProcessState) -> str:
    """A process's state in a few words."""
    if process.ready:
        return "ready"
    return process.reason or "starting"


class PlainDisplay:
    """A line for each change of a process's state."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._said: dict[tuple[str, int], str] = {}

    def update(self, state: StackState) -> None:
        """See :class:`Display`."""
        for process in state.roles:
            word = state_word(process)
            if word == "does not answer yet":
                continue
            key = (process.name, process.index)
            if self._said.get(key) != word:
                self._said[key] = word
                self._write(f"{process.name} {process.index}: {word}")

    def note(self, text: str) -> None:
        """See :class:`Display`."""
        self._write(text)

    def close(self) -> None:
        """See :class:`Display`."""


class LiveDisplay:
    """A table that stays in place."""

    def __init__(self, console: Console) -> None:
        self._state: StackState | None = None
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._table)
        self._live.start()

    def update(self, state: StackState) -> None:
        """See :class:`Display`."""
        self._state = state

    def note(self, text: str) -> None:
        """See :class:`Display`."""
        self._live.console.print(Text(text))

    def close(self) -> None:
        """See :class:`Display`."""
        self._live.stop()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("role", "", "state", "pid", "restarts"):
            table.add_column(column)
        for process in self._state.roles if self._state else ():
            word = Text(state_word(process), style="green" if process.ready else "yellow")
            pid = str(process.pid or "-")
            index = f"{process.index} {process.pool}" if process.pool else ""
            table.add_row(process.name, index, word, pid, str(process.restarts or ""))
        return table


def make_display(console: Console, *, live: bool) -> Display:
    """A table in place on a terminal, plain lines elsewhere and where ``live`` is False."""
    if live and console.is_terminal:
        return LiveDisplay(console)
    return PlainDisplay(lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True))
