"""A replay side by side with what was recorded: figures, JSON lines, and a page. Pure."""

from __future__ import annotations

import html
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from typing import Any, Final

from .runner import TurnResult

#: Longer texts are compared by so many of their words.
_WORDS: Final = 2_000


@dataclass(frozen=True)
class Row:
    """One figure, recorded and replayed."""

    name: str
    recorded: str
    replayed: str


def similarity(result: TurnResult) -> float | None:
    """How alike the texts are, word by word: 1 = equal; None where one of them is missing."""
    before, after = result.recorded.reply, result.text
    if before is None or result.outcome != "completed":
        return None
    if before == after:
        return 1.0
    first, second = (text.split()[:_WORDS] for text in (before, after))
    # Whitespace alone differs, or what comes after the words that are compared.
    return min(SequenceMatcher(None, first, second, autojunk=False).ratio(), 0.999)


def line_of(result: TurnResult) -> dict[str, Any]:
    """A turn as a line of the results."""
    return {**asdict(result), "similarity": similarity(result)}


def figures(results: Sequence[TurnResult]) -> list[Row]:
    """The figures over all turns."""

    def pair(name: str, of: Callable[[Any], float | None], form: str) -> list[Row]:
        sides = ([of(r.recorded) for r in results], [of(r) for r in results])
        found = [[value for value in side if value is not None] for side in sides]
        rows = []
        for title, share in ((f"{name} p50", 0.5), (f"{name} p99", 0.99)):
            before, after = (_at(side, share, form) for side in found)
            rows.append(Row(title, before, after))
        return rows

    alike = [value for value in map(similarity, results) if value is not None]
    equal = sum(value == 1.0 for value in alike)
    return [
        Row("turns", str(len(results)), str(len(results))),
        Row(
            "outcomes",
            _counts(r.recorded.status for r in results),
            _counts(r.outcome for r in results),
        ),
        *pair("TTFT ms", lambda side: side.ttft_ms, ",.0f"),
        *pair("duration ms", lambda side: side.duration_ms, ",.0f"),
        *pair("output tokens", lambda side: side.output_tokens, ",.0f"),
        Row("texts that are equal", "", f"{equal} of {len(alike)}"),
        Row("likeness of texts, mean", "", f"{statistics.fmean(alike):.2f}" if alike else ""),
    ]


def page(results: Sequence[TurnResult]) -> str:
    """The report as one HTML file that fetches nothing."""
    rows = "".join(
        f"<tr><td>{html.escape(row.name)}<td>{html.escape(row.recorded)}<td>{html.escape(row.replayed)}"
        for row in figures(results)
    )
    ordered = sorted(results, key=lambda r: (similarity(r) is not None, similarity(r) or 0.0))
    return _PAGE.replace("{figures}", rows).replace("{turns}", "".join(map(_turn, ordered)))


def _turn(result: TurnResult) -> str:
    alike = similarity(result)
    likeness = "" if alike is None else f"{alike:.2f}"
    asked = result.recorded.added[-1]["content"] if result.recorded.added else ""
    cells = "".join(
        f"<td><pre>{html.escape(text or '')}</pre>"
        for text in (asked, result.recorded.reply, result.text)
    )
    name = html.escape(f"{result.conversation} / {result.turn}")
    return f"<tr><td>{name}<br>{html.escape(result.outcome)}<br>{likeness}{cells}"


def _at(values: list[float], share: float, form: str) -> str:
    if not values:
        return ""
    ordered = sorted(values)
    return format(ordered[min(len(ordered) - 1, int(share * len(ordered)))], form)


def _counts(names: Any) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())


_PAGE: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Replay</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { border: 1px solid #ccc; padding: .3rem .6rem; vertical-align: top; text-align: left }
pre { white-space: pre-wrap; margin: 0; max-width: 40ch; max-height: 20rem; overflow: auto; font: inherit }
</style>
<h1>Replay</h1>
<table><tr><th>figure<th>recorded<th>replayed{figures}</table>
<h2>Turns, the least alike first</h2>
<table><tr><th>turn, outcome, likeness<th>asked<th>recorded<th>replayed{turns}</table>
</html>
"""
