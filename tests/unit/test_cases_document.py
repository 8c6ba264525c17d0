"""``docs/CASES.md`` is true: each test file it names exists and names the case."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROWS = re.findall(
    r"^\| ([A-Z]\d+) .*\|([^|]*)\|$", (TESTS.parent / "docs" / "CASES.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize(("case", "shown_by"), ROWS, ids=[case for case, _ in ROWS])
def test_the_named_tests_are_there_and_name_the_case(case: str, shown_by: str) -> None:
    names = re.findall(r"`([^`]+\.py)`", shown_by)
    assert names
    for name in names:
        [path] = TESTS.rglob(name)
        named = re.search(rf"(?<![a-z0-9]){case}(?![a-z0-9])", path.read_text(), re.IGNORECASE)
        assert named, f"{name} does not name {case}"
