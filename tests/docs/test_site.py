"""Test the documentation site: its navigation, links that leave the folder, vendored files."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from tests.docs.pages import site

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REPOSITORY = "https://example.org/realign"


def test_every_page_is_in_the_navigation_once():
    listed = re.findall(r"([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    decisions = [page for page in pages if page.startswith("adr/0")]  # adr/README.md lists them
    assert sorted(listed) == sorted(set(pages) - set(decisions))


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](guides/data.md#x)", "[a](guides/data.md#x)"),
        ("[a](../README.md#x)", f"[a]({REPOSITORY}/blob/main/README.md#x)"),
        ("[a](../examples)", f"[a]({REPOSITORY}/tree/main/examples)"),
        ("[a](names.py)", f"[a]({REPOSITORY}/blob/main/docs/names.py)"),
        ("![a](images/demo.png)", "![a](images/demo.png)"),
        ("[a](#x) [b](https://c.d/e)", "[a](#x) [b](https://c.d/e)"),
    ],
)
def test_links_that_leave_the_folder_go_to_the_repository(link, expected):
    assert site.rewritten(link, "page.md", REPOSITORY) == expected


def test_vendored_files_have_their_hashes_and_license():
    folder = DOCS / "assets" / "katex"
    lines = [line.split() for line in (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()]
    assert {name for _, name in lines} == {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in (".js", ".css", ".woff2")
    }
    for digest, name in lines:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    assert "MIT" in (folder / "LICENSE").read_text(encoding="utf-8")


def test_variables_of_this_project_are_on_their_page():
    page = (DOCS / "reference" / "environment-variables.md").read_text(encoding="utf-8")
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "realign").rglob("*.py")]
    named = {name for text in sources for name in re.findall(r'"(REALIGN_[A-Z_]+)"', text)}
    assert named
    assert not [name for name in sorted(named) if f"`{name}`" not in page]
