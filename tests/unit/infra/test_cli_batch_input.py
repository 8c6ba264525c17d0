"""Files of prompts as the input of a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.batch import LineFault
from infra.cli.batch_input import ENDPOINT, PromptOptions, batch_lines
from infra.stack.errors import StackError
from producers.batch.lines import parse_line

PLAIN = PromptOptions("default")
COLUMN = PromptOptions("default", column="q")
BOM = b"\xef\xbb\xbf"


def read(path: Path, options: PromptOptions) -> list[dict[str, Any]]:
    """The lines, each checked as a batch's are."""
    lines = list(batch_lines(path, options))
    for number, line in enumerate(lines, 1):
        assert not isinstance(parse_line(number, line, ENDPOINT), LineFault)
    return [json.loads(line) for line in lines]


def prompts(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["custom_id"], line["body"]["messages"][-1]["content"]) for line in lines]


def test_prompts_become_lines_that_say_where_they_stood_K1_K2(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(BOM + "one\r\n\n  \nzwei 🌊\n".encode())
    options = PromptOptions("m", system="Be brief.", max_tokens=5)
    lines = read(path, options)
    assert prompts(lines) == [("row-1", "one"), ("row-4", "zwei 🌊")]
    body = lines[0]["body"]
    assert (body["model"], body["max_tokens"]) == ("m", 5)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


def test_lines_of_a_batch_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    content = BOM + b'\n{"custom_id": "a", "odd" : 1}\nnot json\n{"custom_id": "b"}'
    path.write_bytes(content)
    assert b"".join(batch_lines(path, PLAIN)) == content


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\x00")), min_size=1))
def test_a_column_of_a_csv_file_or_a_parquet_file_gives_the_same_lines(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    import csv

    folder = tmp_path_factory.mktemp("tables")
    with (folder / "t.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerows([["n", "q"], *([str(n), text] for n, text in enumerate(texts))])
    table = arrow.table({"n": list(range(len(texts))), "q": texts})
    parquet.write_table(table, folder / "t.parquet", row_group_size=2)
    wanted = [(f"row-{n}", text) for n, text in enumerate(texts, 1) if text.strip()]
    assert prompts(read(folder / "t.parquet", COLUMN)) == wanted
    assert prompts(read(folder / "t.csv", COLUMN)) == wanted


@pytest.mark.parametrize(
    ("name", "content", "options", "said"),
    [
        ("a.csv", b"x,y\n1,2\n", COLUMN, "no column 'q', but x, y"),
        ("a.csv", b"", COLUMN, "no column 'q', but none at all"),
        ("a.parquet", b"no parquet", COLUMN, "a.parquet"),
        ("a.txt", b"\xff\xfe\x00", PLAIN, "a.txt: 'utf-8' codec"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, name: str, content: bytes, options: PromptOptions, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(StackError, match=said) as refused:
        list(batch_lines(path, options))
    assert "\n" not in str(refused.value)
