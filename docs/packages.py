"""Write the table of packages in docs/concepts/five-things.md from the import contracts: `python docs/packages.py`.

The rows are the layers of the first contract in pyproject.toml, and the texts are the first lines of the packages'
docstrings.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "concepts" / "five-things.md"
BEGIN, END = "<!-- packages -->\n", "<!-- end of packages -->\n"


def contracts() -> list[dict[str, Any]]:
    """Return the contracts of import-linter."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["importlinter"]["contracts"]


def summary(module: str) -> str:
    """Return the first sentence of the docstring of a module or package."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def table() -> str:
    """Return the table, from the command line (the highest layer) down to the pure functions and the errors."""
    layers = contracts()[0]["layers"]
    rows = ["| layer | package | contents |", "|---|---|---|"]
    for number, layer in zip(range(len(layers), 0, -1), layers, strict=True):
        for module in (name.strip() for name in layer.split(":")):
            rows.append(f"| {number} | `{module}` | {summary(module)} |")
    return "\n".join(rows) + "\n"


def rules() -> str:
    """Return the other contracts as a list."""
    return "".join(f"- {contract['name']}\n" for contract in contracts()[1:])


def render(page: str) -> str:
    """Return the page with today's table and rules between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\nThe other contracts:\n\n{rules()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
