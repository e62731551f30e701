"""Write docs/coverage.md from docs/coverage.yaml: `python docs/coverage.py`. A test checks the names in the data."""

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
    "F": "In the texts about these systems, and in no row above",
}
INTRODUCTION = """\
# Feature coverage of five RL systems

This page lists the features of five RL systems, and their implementation in this project. Each row has the options that
enable the feature, experiments or commands that use at least one of them, and its tests. The last column has one of
these states, and the differences from the original system:

- works: implemented and tested as described.
- partial: some of the feature is missing, as described.
- missing: not implemented.

`python docs/coverage.py` writes this page from `docs/coverage.yaml`. `tests/docs/test_coverage.py` fails if a row is
missing, or if an option, experiment, command or test on the page does not exist.

Options are fields of these classes. In a config they are keys of the nodes that use the classes:

{roots}

Tests are in `tests/`, and are named by file and function without `test_`.

{counts}
"""


def read() -> dict[str, Any]:
    """Read the data: `roots` (name -> import path) and `rows` (id -> fields)."""
    data: dict[str, Any] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return data


def state(row: dict[str, Any]) -> str:
    """Return whether a row works, works partly, or is not implemented."""
    if "missing" not in row:
        return "works"
    return "partial" if row.get("tests") else "missing"


def render(data: dict[str, Any]) -> str:
    """Render the page."""
    rows = data["rows"]
    states = [state(row) for row in rows.values()]
    counts = ", ".join(f"{states.count(kind)} {text}" for kind, text in _COUNTS.items() if kind in states)
    roots = "\n".join(f"- `{name}`: `{path}`" for name, path in data["roots"].items())
    page = [INTRODUCTION.format(roots=roots, counts=f"Of {len(rows)} rows {counts}.")]
    for letter, system in SYSTEMS.items():
        page += [
            f"## {letter}. {system}\n",
            "| | feature | options | use | tests | state |",
            "|---|---|---|---|---|---|",
        ]
        page += [_line(name, row) for name, row in rows.items() if name[0] == letter]
        page.append("")
    return "\n".join(page)


_COUNTS = {"works": "work", "partial": "are partial", "missing": "are missing"}


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
