"""Tables as rows of text, for the terminal and for a page of their own (no other file, no network)."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } caption { text-align: left; font-weight: 600; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
.name { text-align: left; } img { max-width: 100%; }
.wide { overflow-x: auto; }
"""


class Rows(NamedTuple):
    """A table. The first ``names`` columns are words, the others numbers."""

    title: str
    names: int
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]


def print_rows(console: Console, table: Rows, *, compact: bool = False) -> None:
    """Print a table whose numbers are never broken into two lines.

    ``compact``: without vertical rules, and the last column of words may wrap.
    """
    if compact:
        shown = Table(title=table.title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        shown.title_justify = "left"
    else:
        shown = Table(title=table.title)
    for position, head in enumerate(table.heads):
        words = position < table.names
        wraps = compact and position == table.names - 1
        shown.add_column(head, justify="left" if words else "right", no_wrap=not wraps)
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


def page(title: str, picture: bytes, alt: str, tables: Iterable[Rows], notes: Iterable[str] = ()) -> str:
    """An HTML page: the PNG ``picture``, said in words by ``alt``, the ``notes`` as a list, the tables."""
    image = base64.b64encode(picture).decode()
    name = html.escape(title)
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style><h1>{name}</h1>"
        f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{image}">'
        f"{f'<ol>{listed}</ol>' if listed else ''}{''.join(_table(rows) for rows in tables)}</html>"
    )


def _table(table: Rows) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = (' class="name"' if position < table.names else "" for position in range(len(row)))
        return "".join(
            f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    return (
        f'<div class="wide"><table><caption>{html.escape(table.title)}</caption>'
        f"<thead><tr>{cells('th', table.heads)}</tr></thead><tbody>{body}</tbody></table></div>"
    )
