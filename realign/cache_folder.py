"""The user's cache folder, and who may write to it."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of cached files: `realign` in XDG_CACHE_HOME, or in `~/.cache`. Make it with mode 0o700."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(home) / "realign").expanduser()


def why_not_private(path: Path) -> str | None:
    """Return how a user other than this one and root could change a file or folder; None if no other user can.

    Raises:
        OSError: the path does not exist.
    """
    status = path.stat()
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users can write to {path}"
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user (uid {status.st_uid})"
    return None


__all__ = ["cache_folder", "why_not_private"]
