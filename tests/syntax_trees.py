"""Syntax trees of source files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path


def trees_of(folder: Path, mention: str) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the files below a folder whose text matches `mention`, in order, with their syntax trees.

    Parsing and searching a tree takes a hundred times longer than searching the text, so `mention` should select the
    files that can matter.
    """
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(mention, text, re.MULTILINE):
            yield path, ast.parse(text)


def calls_of(folder: Path, mention: str) -> Iterator[tuple[Path, str, ast.Call]]:
    """Yield the calls in these files, with the dotted name of the called function."""
    for path, tree in trees_of(folder, mention):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield path, ast.unparse(node.func), node
