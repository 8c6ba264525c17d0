"""Turns on disk until all are there: memory stays small however long the log is."""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any


class Shelf:
    """The turns of an export, each once."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute(
            "CREATE TABLE turns (request_id TEXT PRIMARY KEY, tenant TEXT, conversation TEXT,"
            " created_ms INTEGER, turn TEXT) WITHOUT ROWID"
        )

    def put(self, tenant: str, conversation: str, turn: dict[str, Any]) -> bool:
        """Keep a turn; False where one of this request is there already, which stays."""
        row = (turn["request_id"], tenant, conversation, turn["created_ms"], json.dumps(turn))
        done = self._connection.execute("INSERT OR IGNORE INTO turns VALUES (?, ?, ?, ?, ?)", row)
        return done.rowcount == 1

    def conversations(self) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
        """Tenant, conversation and its turns, oldest first; in an order that depends on nothing else."""
        self._connection.execute(
            "CREATE TABLE begun AS SELECT tenant, conversation, MIN(request_id) AS first FROM turns"
            " GROUP BY tenant, conversation"
        )
        rows = self._connection.execute(
            "SELECT tenant, conversation, turn FROM turns JOIN begun USING (tenant, conversation)"
            " ORDER BY first, request_id"
        )
        for (tenant, conversation), group in groupby(rows, key=lambda row: (row[0], row[1])):
            yield tenant, conversation, [json.loads(turn) for *_, turn in group]


@contextmanager
def open_shelf() -> Iterator[Shelf]:
    """A shelf in a folder of its own, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="headrace-export-") as folder:
        path = Path(folder, "turns.sqlite")
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            yield Shelf(connection)
