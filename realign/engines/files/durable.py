"""Write files durably, and open only regular files.

After a power loss, a file has its content only if it was synced to disk, and its name only if its folder was synced.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from realign.errors import ConfigError


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sync_tree(folder: Path) -> None:
    """Sync every file and folder below a folder to disk, and then the folder itself. Links are not followed."""
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink():
            continue
        if entry.is_dir():
            sync_tree(entry)
        elif entry.is_file():
            number = os.open(entry, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)
    sync_folder(folder)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, and sync the names of the created ones to disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def open_regular(path: Path, flags: int, mode: str) -> BinaryIO:
    """Open a regular file without buffering, and without waiting for a pipe or following a link.

    Args:
        path: path of the file.
        flags: flags of `os.open`.
        mode: mode of the returned file object.

    Raises:
        ConfigError: the path is a pipe, device, socket, folder or link.
        OSError: the file cannot be opened.
    """
    try:
        number = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR, errno.EMLINK):
            raise not_regular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise not_regular(path)
    return os.fdopen(number, mode, buffering=0)  # type: ignore[return-value]


def not_regular(path: Path) -> ConfigError:
    """Return the error for a path that must be a regular file."""
    return ConfigError(f"{str(path)!r} is not a regular file. Remove it, or choose another output_dir.")
