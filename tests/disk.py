"""Record in which order files and folders are synced and renamed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest


class DiskLog:
    """Records every `os.fsync`, `os.rename` and `os.replace` from now on, by the identity of the file or folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._events: list[tuple[str, tuple[int, int]]] = []
        sync, rename, replace = os.fsync, os.rename, os.replace

        def synced(number: int) -> None:
            sync(number)
            self._note("sync", os.fstat(number))

        def renamed(source, target, **options):
            rename(source, target, **options)
            self._note("rename", os.lstat(target))

        def replaced(source, target, **options):
            replace(source, target, **options)
            self._note("rename", os.lstat(target))

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "rename", renamed)
        monkeypatch.setattr(os, "replace", replaced)

    def _note(self, event: str, stat: os.stat_result) -> None:
        self._events.append((event, (stat.st_dev, stat.st_ino)))

    def last_sync(self, path: Path) -> int:
        """Return the number of the last sync of a file or folder; -1 if there is none."""
        return max(self.syncs(path), default=-1)

    def syncs(self, path: Path) -> list[int]:
        """Return the numbers of all syncs of a file or folder."""
        return self._all("sync", path)

    def renamed_to(self, path: Path) -> int:
        """Return the number of the last rename to a path, which must exist."""
        numbers = self._all("rename", path)
        assert numbers, f"{path} was not renamed"
        return numbers[-1]

    def _all(self, event: str, path: Path) -> list[int]:
        stat = path.stat()
        wanted = (event, (stat.st_dev, stat.st_ino))
        return [number for number, noted in enumerate(self._events) if noted == wanted]


def unix_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)  # `bind` takes short paths only


OTHERS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to(path.parent / "there"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to a pipe": lambda path: path.symlink_to(path.parent / "queue"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "socket": unix_socket,
}
"""What can be in place of a file, by name."""
