"""Files of prompts as the input of a batch: JSON lines are taken as they are, a prompt becomes a line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..stack.errors import StackError

ENDPOINT = "/v1/chat/completions"


@dataclass(frozen=True)
class PromptOptions:
    """What every prompt of a file is asked with.

    Attributes:
        column: of a CSV or Parquet file; None = one prompt a line, or lines in the batch format.
        max_tokens: longest reply; None = the model's own limit.
    """

    model: str
    system: str | None = None
    max_tokens: int | None = None
    column: str | None = None


def batch_lines(path: Path, options: PromptOptions) -> Iterator[bytes]:
    """The lines of a batch that a file stands for, each with its end, as they are read.

    Prompts that are empty are left out; a line's ``custom_id`` says which row of the file it is, from 1.

    Raises:
        StackError: the file cannot be read so; one line for people.
    """
    try:
        if options.column is None and _is_batch(path):
            with path.open("rb") as file:
                yield from file
            return
        for row, prompt in _prompts(path, options.column):
            if prompt.strip():
                yield _line(row, prompt, options)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StackError(f"{path}: {error}") from None


def endpoint_of(path: Path) -> str:
    """The endpoint that the first line of a file in the batch format names."""
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        return str(json.loads(first.decode("utf-8-sig"))["url"])
    except (ValueError, KeyError, TypeError):
        return ENDPOINT


def _is_batch(path: Path) -> bool:
    """Whether the first line that is not blank is one of a batch: an object with a ``custom_id``."""
    with path.open(encoding="utf-8-sig") as file:
        first = next((line for line in file if line.strip()), "")
    try:
        return "custom_id" in json.loads(first)
    except (ValueError, TypeError):
        return False


def _prompts(path: Path, column: str | None) -> Iterable[tuple[int, str]]:
    if column is None:
        return _plain(path)
    return _parquet(path, column) if path.suffix.lower() == ".parquet" else _csv(path, column)


def _plain(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8-sig") as file:
        for row, line in enumerate(file, 1):
            yield row, line.rstrip("\r\n")


def _csv(path: Path, column: str) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        _check_column(path, column, rows.fieldnames or ())
        for row, fields in enumerate(rows, 1):
            yield row, fields[column] or ""


def _parquet(path: Path, column: str) -> Iterator[tuple[int, str]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise StackError(
            "Parquet files need pyarrow: install headrace[parquet], or give a CSV file"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(path, column, file.schema_arrow.names)
            row = 0
            for part in file.iter_batches(columns=[column]):
                for value in part.column(0).to_pylist():
                    row += 1
                    yield row, "" if value is None else str(value)
    except arrow.ArrowInvalid as error:
        raise StackError(f"{path}: {error}") from None


def _check_column(path: Path, column: str, names: Iterable[str]) -> None:
    if column not in names:
        raise StackError(f"{path} has no column '{column}', but {', '.join(names) or 'none at all'}")


def _line(row: int, prompt: str, options: PromptOptions) -> bytes:
    system = [{"role": "system", "content": options.system}] if options.system else []
    body: dict[str, Any] = {
        "model": options.model,
        "messages": [*system, {"role": "user", "content": prompt}],
    }
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    line = {"custom_id": f"row-{row}", "method": "POST", "url": ENDPOINT, "body": body}
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"
