"""Hashes of the models in `final`, which the checkpoint of the last step contains."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realign.engines.files.folders import sync_folder, sync_tree
from realign.runtime.checkpoint.atomic_write import facts_of

FINAL = "final"
"""Name of the folder with the models of the last step."""


def hashes_of(folder: Path) -> dict[str, Any]:
    """Return size and sha256 of every file below a folder, by relative path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): facts_of(path) for path in files}


def settle(folder: Path) -> dict[str, Any]:
    """Sync a folder to disk, whatever engine wrote it, and return `hashes_of` it."""
    sync_tree(folder)
    sync_folder(folder.parent)
    return hashes_of(folder)


def damage_of(folder: Path, files: Mapping[str, Any] | None) -> str | None:
    """Return what is wrong with the files in a folder, or None.

    Args:
        folder: Folder that `hashes_of` was called with.
        files: Result of `hashes_of`. None, from a checkpoint of an earlier version: only the folder must exist.
    """
    if not folder.is_dir():
        return "the folder is missing"
    for name, facts in (files or {}).items():
        path = folder / name
        try:
            found = path.lstat()
        except OSError as error:
            return f"{name}: {error.strerror}"
        if not stat.S_ISREG(found.st_mode):
            return f"{name}: not a regular file"
        if found.st_size != facts["bytes"]:
            return f"{name}: {found.st_size} bytes, expected {facts['bytes']}"
        if facts_of(path) != facts:
            return f"{name}: sha256 mismatch"
    return None
