"""Hook of MkDocs. The pages are plain Markdown, so that they read well on GitHub too; this makes the site's version.

- Links that leave `docs` point to the repository.
- Fences keep only their language.
- `> [!NOTE]` becomes an admonition.
- Code blocks under the labels **Command line**, **YAML** and **Python** become tabs.
- The search finds the page that answers what people ask most.
- Project records don't show up in search, and pages of classes only behind guides.
- The landing page has no side columns.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

# Words after the language say how the tests read a block. superfences would take such a fence for the end of another.
FENCE = re.compile(r"^( *```\w+) [^\n{]*$", re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")
NOTE = re.compile(r"^> \[!(NOTE|TIP|WARNING)\]\n((?:>.*\n?)+)", re.MULTILINE)
LABELS = ("Command line", "YAML", "Python")
TAB = rf"\*\*(?:{'|'.join(LABELS)})\*\*\n\n```.*?\n```\n"
TABS = re.compile(rf"^{TAB}(?:\n{TAB})+", re.MULTILINE | re.DOTALL)
ONE_TAB = re.compile(r"\*\*([\w ]+)\*\*\n\n(```.*?\n```\n)", re.DOTALL)
UNSEARCHED = ("adr/", "studies/", "coverage.md", "robustness.md", "compatibility.md")
"""Records about the project itself. A search for "batch size" is no search for a decision record."""

CLASSES = "reference/api/"
ASKED = {
    "algorithms/README.md": ["which algorithm"],
    "algorithms/grpo.md": ["grpo", "kl penalty"],
    "faq.md": ["why is my loss zero", "loss 0"],
    "guides/data.md": ["chat template", "dataset format"],
    "guides/hyperparameters.md": ["epochs", "learning rate", "batch size"],
    "guides/models.md": ["lora", "bf16", "quantization"],
    "guides/report.md": ["log completions", "samples"],
    "guides/resume.md": ["resume", "checkpoint"],
    "guides/rewards.md": ["reward function", "custom reward"],
    "guides/sizing.md": ["out of memory", "oom"],
    "reference/run.md": ["temperature", "stop string", "max_new_tokens"],
    "troubleshooting.md": ["reward does not increase", "nan"],
}
"""What people type into the search, and the page that answers it: the index has these words as the page's tags."""


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite a page; MkDocs calls this function by its name."""
    if page.file.src_uri.startswith(UNSEARCHED):
        page.meta["search"] = {"exclude": True}
    if page.file.src_uri.startswith(CLASSES):
        # "temperature" is more often a question about a setting than about an attribute of this name
        page.meta["search"] = {"boost": 0.001}
    page.meta["tags"] = ASKED.get(page.file.src_uri, [])
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    return rewritten(markdown, page.file.src_uri, config["repo_url"])


def on_post_build(config: Any) -> None:
    """Fail if the search index doesn't have what `ASKED` promises."""
    index = json.loads((Path(config["site_dir"]) / "search" / "search_index.json").read_text(encoding="utf-8"))
    indexed = {word: page["location"] for page in index["docs"] for word in page.get("tags", ())}
    missing = {word for words in ASKED.values() for word in words} - indexed.keys()
    if missing:
        raise ValueError(f"the search index lacks the tags {sorted(missing)}: does each page of ASKED exist?")


def rewritten(markdown: str, page: str, repository: str) -> str:
    """Return a page for the site.

    Args:
        markdown: Text of the page.
        page: Path of the page below `docs`.
        repository: Address of the repository.
    """

    def link(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        path, mark, anchor = target.partition("#")
        full = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), path)) if path else ""
        if not full or (full.startswith("docs/") and full.endswith((".md", ".png", ".svg"))):
            return match.group(0)
        kind = "tree" if "." not in posixpath.basename(full) else "blob"
        return f"{picture}[{text}]({repository}/{kind}/main/{full}{mark}{anchor})"

    return LINK.sub(link, NOTE.sub(_admonition, TABS.sub(_tabs, FENCE.sub(r"\1", markdown))))


def _admonition(match: re.Match[str]) -> str:
    lines = [line[1:].strip() for line in match[2].splitlines()]
    return f"!!! {match[1].lower()}\n\n" + "\n".join(f"    {line}".rstrip() for line in lines) + "\n"


def _tabs(match: re.Match[str]) -> str:
    return "\n".join(
        f'=== "{label}"\n\n' + "".join(f"    {line}".rstrip() + "\n" for line in block.splitlines())
        for label, block in ONE_TAB.findall(match[0])
    )
