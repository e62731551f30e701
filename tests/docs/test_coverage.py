"""Test the coverage page: it has every row once, and the test of each exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
LAST = {"A": 44, "B": 24, "C": 32, "D": 7, "E": 11, "F": 10}
ROWS = re.findall(r"^\| \*\*(\w+)\*\* .* \| `([\w/]+\.py)::(test_\w+)` \|$", PAGE, re.MULTILINE)


def test_every_row_is_there_once_and_in_order():
    assert [row for row, *_ in ROWS] == [f"{x}{number}" for x, last in LAST.items() for number in range(1, last + 1)]


def test_the_test_of_every_row_exists():
    absent = []
    for row, file, name in ROWS:
        path = ROOT / file if file.startswith("extras/") else ROOT / "tests" / file
        if not re.search(rf"^def {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            absent.append(f"{row}: {file}::{name}")
    assert absent == []
