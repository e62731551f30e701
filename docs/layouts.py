"""Write the table of layouts in docs/guides/data.md from the rows that tests read: `python -m docs.layouts`."""

from __future__ import annotations

from pathlib import Path

from tests.data.layouts import LAYOUTS

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "data.md"
BEGIN, END = "<!-- layouts -->\n", "<!-- end of layouts -->\n"


def render(page: str) -> str:
    """Return the page with the table of today's layouts between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = ["| written by | columns | data class | what realign reads |", "|---|---|---|---|"]
    rows += [f"| {layout.tool} | {layout.columns} | `{layout.data}` | {layout.reading} |" for layout in LAYOUTS]
    return f"{before}{BEGIN}\n" + "\n".join(rows) + f"\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
