"""Writes docs/coverage.md from docs/coverage.yaml: `python docs/coverage.py`. A test checks what the data names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
DATA, PAGE = HERE / "coverage.yaml", HERE / "coverage.md"

SYSTEMS = {
    "A": "openai/lm-human-preferences and its reproduction in Hugging Face's post on the details of RLHF with PPO",
    "B": "trlX",
    "C": "DeepSpeed-Chat, with pieces of ColossalChat, LMFlow and the recipes of papers",
    "D": "OpenRLHF",
    "E": "realhf, the first generation of AReaL",
}
INTRODUCTION = """\
# What works: the systems this project grew from, row by row

The methods of five systems are options here. Each row is one thing that one of them does: what it is, the option that
switches it on, an experiment or command that uses it, and the test that holds it. `works`: tested as described, with
departures in the last column. `in part`: the last column says what is missing. `waits`: not there.

This page is written by `python docs/coverage.py` from `docs/coverage.yaml`. `tests/docs/test_coverage.py` fails if a
row is missing, or if an option, an experiment, a command or a test that the page names does not exist.

Options are fields of these classes. In a config they are keys of the places that the classes are used in:

{roots}

Tests are named by file and function, without `test_`, and stand in `tests/`.

{counts}
"""


def read() -> dict[str, Any]:
    """The data: `roots`, name -> import path, and `rows`, id -> fields."""
    data: dict[str, Any] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return data


def state(row: dict[str, Any]) -> str:
    """Whether a row works, works in part, or waits."""
    if "missing" not in row:
        return "works"
    return "in part" if row.get("tests") else "waits"


def render(data: dict[str, Any]) -> str:
    """The page."""
    rows = data["rows"]
    states = [state(row) for row in rows.values()]
    counts = ", ".join(f"{states.count(kind)} {text}" for kind, text in _COUNTS.items() if kind in states)
    roots = "\n".join(f"- `{name}`: `{path}`" for name, path in data["roots"].items())
    page = [INTRODUCTION.format(roots=roots, counts=f"Of {len(rows)} rows {counts}.")]
    for letter, system in SYSTEMS.items():
        page += [f"## {letter}. {system}\n", "| | what | options | use | tests | state |", "|---|---|---|---|---|---|"]
        page += [_line(name, row) for name, row in rows.items() if name[0] == letter]
        page.append("")
    return "\n".join(page)


_COUNTS = {"works": "work", "in part": "work in part", "waits": "wait"}


def _line(name: str, row: dict[str, Any]) -> str:
    notes = " ".join(filter(None, [row.get("note"), row.get("missing") and f"Missing: {row['missing']}"]))
    cells = [
        f"**{name}**",
        row["does"],
        _codes(row.get("options", [])),
        _codes(row.get("use", [])),
        _codes(test.replace("::test_", "::") for test in row.get("tests", [])),
        f"{state(row)}. {notes}" if notes else state(row),
    ]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _codes(names: Any) -> str:
    return "<br>".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(render(read()), encoding="utf-8")
