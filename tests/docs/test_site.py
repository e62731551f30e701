"""Test the documentation site: its navigation, links that leave the folder, vendored files."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.docs.pages import site

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REPOSITORY = "https://example.org/realign"


def test_every_page_is_in_the_navigation_once():
    listed = re.findall(r"([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(pages)


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


def test_fences_keep_only_their_language():
    fence = "```jsonl PreferenceData margin_column=margin\n{}\n```\n"
    assert site.rewritten(fence, "page.md", REPOSITORY) == "```jsonl\n{}\n```\n"
    assert site.rewritten("```{ .python }\n1\n```", "page.md", REPOSITORY) == "```{ .python }\n1\n```"


def test_notes_become_admonitions():
    note = "> [!NOTE]\n> Read [a](../examples).\n> Twice.\n\nText\n"
    expected = f"!!! note\n\n    Read [a]({REPOSITORY}/tree/main/examples).\n    Twice.\n\nText\n"
    assert site.rewritten(note, "page.md", REPOSITORY) == expected


def test_labeled_code_becomes_tabs():
    blocks = "**Python**\n\n```python run\na\n\nb\n```\n\n**Command line**\n\n```bash\nc\n```\n"
    expected = (
        '=== "Python"\n\n    ```python\n    a\n\n    b\n    ```\n\n=== "Command line"\n\n    ```bash\n    c\n    ```\n'
    )
    assert site.rewritten(blocks, "page.md", REPOSITORY) == expected
    alone = "**Python**\n\n```python\na\n```\n"
    assert site.rewritten(alone, "page.md", REPOSITORY) == alone


@pytest.mark.parametrize(("path", "expected"), [("adr/0001-x.md", True), ("guides/data.md", None)])
def test_records_of_the_project_are_not_searched(path, expected):
    page = SimpleNamespace(file=SimpleNamespace(src_uri=path), meta={}, is_homepage=False)
    site.on_page_markdown("text", page, {"repo_url": REPOSITORY}, None)
    assert page.meta.get("search", {}).get("exclude") is expected


def test_links_of_pages_in_folders_are_relative_to_them():
    link = f"[a]({REPOSITORY}/blob/main/CONTRIBUTING.md)"
    assert site.rewritten("[a](../../CONTRIBUTING.md)", "guides/page.md", REPOSITORY) == link


def test_vendored_files_have_their_hashes_and_licence():
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
