"""The one module that opens, copies, writes and removes files in folders that others can write to.

It follows no link and waits for no pipe. It removes and replaces only what realign made, which `OwnFiles` knows from a
list in the folder. Everything else, also a file that was changed since, belongs to somebody else.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from typing_extensions import override

from realign.errors import ConfigError

FILES = "files.jsonl"
"""Name of the file that lists what realign made in its folder."""
_HEAD = '{"realign": "files that realign made here; it removes and replaces no others"}'
_LARGEST = 256 << 20
_SCRATCH = re.compile(r"\..+\.[0-9a-f]{8}")
_INSIDE: Mapping[str, str] = {
    "calls": r"\.?step_\d{6,}\.safetensors(\.[0-9a-f]{8})?",
    "tensorboard": r"events\.out\.tfevents\.[^/]*",
}
"""Files that realign makes in a folder that it claimed by its name. Of other folders, the list has every file."""


# --- single files ---


def why_not_private(path: Path) -> str | None:
    """Return how a user other than this one and root could change a file or folder; None if no other user can.

    Raises:
        OSError: the path does not exist.
    """
    for status in (path.lstat(), path.stat()):  # also the owner of a link decides where it leads
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to another user (uid {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users can write to {path}"
    return None


def refuse_link(path: Path) -> None:
    """Raise ConfigError if `path`, a file or folder of a run, is a symbolic link."""
    if path.is_symlink():
        raise ConfigError(
            f"{str(path)!r} is a link to {str(path.readlink())!r}, but a run writes only into its own folder. Remove "
            "the link, or choose another output_dir."
        )


def not_regular(path: Path) -> ConfigError:
    """Return the error for a path that must be a regular file."""
    return ConfigError(f"{str(path)!r} is not a regular file. Remove it, or choose another output_dir.")


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


def open_new(path: Path) -> BinaryIO:
    """Create a file, and open it for writing with a buffer.

    Raises:
        OSError: something of this name exists, also a link, or the folder cannot be written to.
    """
    return path.open("xb")


def read_regular(path: Path, limit: int) -> bytes:
    """Return the content of a regular file; empty if it is missing, another kind of file, or larger than `limit`."""
    with suppress(OSError, ValueError, ConfigError), open_regular(path, os.O_RDONLY, "rb") as file:
        if os.fstat(file.fileno()).st_size <= limit:
            parts = []
            while (part := file.read(1 << 24)) and (limit := limit - len(part)) >= 0:
                parts.append(part)
            return b"" if part else b"".join(parts)
    return b""


def scratch_name(path: Path) -> Path:
    """Return a hidden name beside a path that nobody uses."""
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}")


def replace_bytes(path: Path, content: bytes, *, sync: bool = False, mode: int = 0o666) -> None:
    """Write a file atomically: a reader sees the earlier file or this one, and a link at `path` is replaced.

    Raises:
        OSError: the file cannot be written. An earlier one is unchanged.
    """
    new = scratch_name(path)
    number = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(number, "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
    if sync:
        sync_folder(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Write a text as `replace_bytes` does."""
    replace_bytes(path, text.encode(errors="backslashreplace"))


def copy_file(source: Path, target: Path) -> None:
    """Copy the content of a file to a new file.

    Raises:
        OSError: `target` exists, or cannot be written.
    """
    with source.open("rb") as content, open_new(target) as copy:
        shutil.copyfileobj(content, copy, 1 << 24)


def move(source: Path, target: Path) -> None:
    """Rename what this process made. A file at `target`, or a link there, is replaced; a folder with files never is.

    Raises:
        OSError: there is a folder with files, or the disk refuses it.
    """
    os.replace(source, target)


def remove_file(path: Path) -> None:
    """Remove a file, or a link, that this process made, if it exists."""
    path.unlink(missing_ok=True)


def remove_empty(*folders: Path) -> None:
    """Remove folders in which nothing is left."""
    for folder in folders:
        with suppress(OSError):  # somebody else's files
            folder.rmdir()


def remove_scratch(folder: Path) -> None:
    """Remove a folder that this process made under a name that nobody else uses, as far as possible."""
    shutil.rmtree(folder, ignore_errors=True)


# --- folders ---


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
            sync_folder(entry)
    sync_folder(folder)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, and sync the names of the created ones to disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def set_aside(path: Path) -> Path:
    """Rename a file or folder to a free name, such as `final.1`, and return it."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{number}")):
        number += 1
    path.rename(aside)
    return aside


class OwnFiles:
    """What realign made in a folder, according to the list in its files.jsonl.

    The list has a line for each name. It is written before the name appears in the folder, so a process that is killed
    leaves no file that the next one takes for somebody else's. A line with `files` lists every file below the name
    with its size and time of change. A line without is of a file that grows or is written again, such as
    metrics.jsonl, or of a folder in `_INSIDE`. The folder may come from a stranger: no path is taken from the list,
    they are only looked up in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check(self, *names: str) -> None:
        """Check that realign made what exists under these names.

        Raises:
            ConfigError: it did not.
        """
        for name in names:
            if (stranger := self.stranger(name)) is not None:
                raise ConfigError(
                    f"{str(stranger)!r} is not a file that realign wrote, so it is not replaced. Move it, or choose "
                    "another folder."
                )

    def claim(self, *names: str) -> None:
        """Record names under which this process is about to write.

        Raises:
            ConfigError: one of them exists, and realign did not make it.
            OSError: the folder cannot be written to.
        """
        self.check(*names)
        self.record_existing(*names)

    def record_existing(self, *names: str) -> None:
        """Record names of a run that goes on, whose list may be gone."""
        named = {entry["path"] for entry in self._entries() if "files" not in entry}
        if new := [name for name in names if name not in named]:
            self._append(*({"path": name} for name in new))

    def record(self, name: str, tree: Path) -> None:
        """Record the files in the folder `tree`, which is about to be renamed to `name`.

        Raises:
            OSError: the folder cannot be written to.
        """
        files = {path.relative_to(tree).as_posix(): _facts(path) for path in _below(tree)}
        self._append({"path": name, "files": files})

    def scratch(self, name: str) -> Path:
        """Make a hidden folder with a random name, in which something that becomes `name` is written.

        Raises:
            OSError: the folder cannot be written to.
        """
        path = scratch_name(self.folder / name)
        self._append({"path": path.name})
        path.mkdir()
        return path

    def scratches(self) -> list[Path]:
        """Return the folders of `scratch` that exist, such as those of processes that were killed."""
        named = {entry["path"] for entry in self._entries()}
        found = (path for path in self.folder.glob(".*.????????") if path.name in named)
        return [path for path in found if _SCRATCH.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]

    def stranger(self, name: str, at: str | None = None) -> Path | None:
        """Return a file at or below `name` that realign did not make; None if there is none.

        Args:
            name: name of a file or folder in this folder.
            at: where it is now, if it was renamed.
        """
        root = self.folder / (at or name)
        if name == FILES:
            return None if self._is_ours() else root
        entries = [entry for entry in self._entries() if entry["path"] == name]
        by_name = any("files" not in entry for entry in entries)
        inside = re.compile(_INSIDE.get(name, r"\."))
        listed = [entry["files"] for entry in entries if isinstance(entry.get("files"), dict)]
        try:
            for path in _below(root):
                inner, facts = path.relative_to(root).as_posix(), _facts(path)
                ours = (by_name and inside.fullmatch(inner)) or any(_fits(files.get(inner), facts) for files in listed)
                if not ours or not stat.S_ISREG(path.lstat().st_mode):
                    return path
        except OSError as error:  # a folder that cannot be read
            return Path(error.filename or root)
        return None

    def remove(self, name: str, at: str | None = None) -> Path | None:
        """Remove a file or folder, all of it or nothing.

        Args:
            name: see `stranger`.
            at: see `stranger`.

        Returns:
            A file that realign did not make, for which it stays; None if it is gone.

        Raises:
            OSError: it cannot be removed.
        """
        path = self.folder / (at or name)
        if (stranger := self.stranger(name, at)) is not None:
            return stranger
        if not path.is_dir():
            path.unlink(missing_ok=True)
        elif name in _INSIDE or any(entry["path"] == name and "files" in entry for entry in self._entries()):
            # renamed first, so that an interruption leaves no part of a model or checkpoint under its name
            aside = scratch_name(self.folder / name)
            with suppress(OSError):  # a full disk, on which this makes space
                self._append({"path": aside.name})
            path.rename(aside)
            shutil.rmtree(aside)
        return None

    def restart(self, *names: str) -> None:
        """Start the list again with these names, after everything else in it was removed."""
        lines = [_HEAD, *(json.dumps({"path": name}) for name in names)]
        replace_text(self.folder / FILES, "\n".join(lines) + "\n")

    def forget(self) -> None:
        """Remove the list, after everything in it."""
        if self._is_ours():
            remove_file(self.folder / FILES)

    def _is_ours(self) -> bool:
        """Return whether the list is one of realign, or missing."""
        try:
            with open_regular(self.folder / FILES, os.O_RDONLY, "rb") as file:
                return _HEAD.encode().startswith(file.read(len(_HEAD)))  # a full disk can cut it
        except FileNotFoundError:
            return True
        except (OSError, ConfigError):
            return False

    def _entries(self) -> Iterator[dict[str, Any]]:
        head, *lines = read_regular(self.folder / FILES, _LARGEST).split(b"\n")
        for line in lines if head == _HEAD.encode() else ():
            with suppress(ValueError, RecursionError):  # the process was killed while it wrote the line
                entry = json.loads(line)
                if isinstance(entry, dict) and isinstance(entry.get("path"), str):
                    yield entry

    def _append(self, *entries: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._is_ours():
            raise ConfigError(f"{str(self.folder / FILES)!r} is not a file that realign wrote. Move it.")
        with open_regular(self.folder / FILES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab") as file:
            whole = os.fstat(file.fileno()).st_size >= len(_HEAD)
            if not whole:
                file.truncate(0)
            head = "" if whole else _HEAD
            # a line break first: the last line may be that of a process that was killed
            content = "".join([head, *(f"\n{json.dumps(entry)}" for entry in entries), "\n"]).encode()
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


class SavedHere(OwnFiles):
    """What this process saved in a folder that somebody named: the list is in memory, and no file is added."""

    _saved: ClassVar[dict[Path, list[dict[str, Any]]]] = {}

    @override
    def _entries(self) -> Iterator[dict[str, Any]]:
        for path, entries in self._saved.items():
            if path.parent == self.folder.resolve():
                yield from entries

    @override
    def _append(self, *entries: Mapping[str, Any]) -> None:
        for entry in entries:
            path = self.folder.resolve() / entry["path"]
            self._saved[path] = [*self._saved.get(path, [])[-1:], dict(entry)]  # what is there, and what replaces it


def _below(path: Path) -> Iterator[Path]:
    """Yield every file below a path, or the path itself if it is none; links and pipes count as files.

    Raises:
        OSError: a folder cannot be read.
    """
    if not path.is_dir() or path.is_symlink():
        if os.path.lexists(path):
            yield path
        return
    for entry in sorted(path.iterdir()):
        yield from _below(entry)


def _facts(path: Path) -> list[int]:
    status = path.lstat()
    return [status.st_size, status.st_mtime_ns]


def _fits(listed: Any, facts: list[int]) -> bool:
    """Return whether facts are the listed ones, also on a disk or after a copy that keeps a coarser time."""
    if not isinstance(listed, list) or len(listed) != 2 or not all(isinstance(x, int) for x in listed):
        return False
    size, changed = listed
    return facts[0] == size and facts[1] in [changed // unit * unit for unit in (1, 100, 10**3, 10**6, 10**9)]
