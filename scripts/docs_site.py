"""Hook of MkDocs: links that leave `docs` point to the repository, and fences keep only their language."""

from __future__ import annotations

import posixpath
import re
from typing import Any

# Words after the language say how the tests read a block. superfences would take such a fence for the end of another.
FENCE = re.compile(r"^( *```\w+) [^\n{]*$", re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page; MkDocs calls this function by its name."""
    return rewritten(markdown, page.file.src_uri, config["repo_url"])


def rewritten(markdown: str, page: str, repository: str) -> str:
    """Return a page for the site: plain fences, and links to the repository for files outside `docs` and for code.

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

    return LINK.sub(link, FENCE.sub(r"\1", markdown))
