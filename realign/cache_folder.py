"""The user's cache folder: who may write to it, and its files of limited size that runs and processes share."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from realign.errors import ConfigError

LIMIT = "REALIGN_CACHE_GB"
"""Environment variable with the size limit of the shared files in GB: a property of the machine, and of no run."""
DEFAULT_GB = 10.0
_SHARED = ("arrays/*.safetensors", "logprobs/*/*.safetensors")
"""Files that count toward the limit: not those that a process is writing."""
_TEMPORARY, _ABANDONED_S = ".tmp", 3600
"""Ending of files that a process is writing, and the age in seconds at which their writer must have been killed."""


def cache_folder() -> Path:
    """Return the folder of cached files: `realign` in XDG_CACHE_HOME, or in `~/.cache`. See `make_private`."""
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


def make_private(folder: Path) -> None:
    """Make a folder below `cache_folder`, and those between, which no other user can write to, whatever the umask.

    Raises:
        OSError: a folder cannot be made.
    """
    root = cache_folder()
    root.parent.mkdir(parents=True, exist_ok=True)
    for part in reversed([folder, *folder.parents]):
        if part == root or root in part.parents:
            part.mkdir(mode=0o700, exist_ok=True)  # `parents=True` would give the mode to the last one only


def size_limit() -> int:
    """Return the size limit of all shared files together, in bytes.

    Raises:
        ConfigError: the environment variable is not a number of at least 0.
    """
    text = os.environ.get(LIMIT) or str(DEFAULT_GB)
    with suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return int(float(text) * 1e9)
    raise ConfigError(f"{LIMIT}={text!r}: expected a number of gigabytes, 0 or larger. The default is {DEFAULT_GB:g}.")


def write_shared(path: Path, content: bytes) -> None:
    """Write a file that other processes may read, replace or remove. They see all of it or nothing.

    Raises:
        OSError: the folder is not writable, or the disk is full.
    """
    make_private(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=_TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def remove_least_recently_used() -> None:
    """Remove shared files until the rest is within the limit, and files of killed writers. Open files stay readable."""
    files = []
    for pattern in _SHARED:
        for path in cache_folder().glob(pattern.replace(".safetensors", _TEMPORARY)):
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime > _ABANDONED_S:
                    path.unlink()
        for path in cache_folder().glob(pattern):
            with suppress(FileNotFoundError):  # other processes remove files too
                status = path.lstat()
                files.append((status.st_mtime_ns, status.st_size, path))
    excess = sum(size for _, size, _ in files) - size_limit()
    for _, size, path in sorted(files):
        if excess <= 0:
            return
        with suppress(OSError):
            path.unlink(missing_ok=True)
        excess -= size


__all__ = [
    "DEFAULT_GB",
    "LIMIT",
    "cache_folder",
    "make_private",
    "remove_least_recently_used",
    "size_limit",
    "why_not_private",
    "write_shared",
]
