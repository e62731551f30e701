"""Write the tables of names of other tools from `realign/config/names.yaml`: `python docs/names.py`."""

from __future__ import annotations

import re
from pathlib import Path

from realign.config.aliases import Row, tables

DOCS = Path(__file__).parent
PAGES = (DOCS / "migration.md", DOCS / "concepts" / "from-realhf.md", DOCS / "guides" / "command-line.md")
BLOCK = re.compile(r"(<!-- names: (\w+) -->\n)(.*?)(<!-- end of names -->)", re.DOTALL)


def render(page: str) -> str:
    """Return a page with its tables replaced by those of `names.yaml`."""
    return BLOCK.sub(lambda found: f"{found[1]}{_table(found[2])}{found[4]}", page)


def _table(title: str) -> str:
    table = tables()[title]
    rows = [f"| {_names(row, flags=table.get('flags', False))} | {_sentence(row.text())} |\n" for row in table["rows"]]
    return f"| {table['head']} | realign |\n|---|---|\n{''.join(rows)}"


def _names(row: Row, *, flags: bool) -> str:
    written = [f"--{name.removesuffix('=true').replace('=', ' ')}" if flags else name for name in row.names]
    return ", ".join(f"`{name}`" for name in written) + (f" ({row.cell})" if row.cell else "")


def _sentence(text: str) -> str:
    return text if text.startswith("realign") else text[:1].upper() + text[1:]


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
