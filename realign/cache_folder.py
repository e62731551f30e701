"""The user's cache folder: private files that runs and processes share, and a limit of their size."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from realign.errors import ConfigError
from realign.own_files import (
    copy_file,
    move,
    open_regular,
    read_regular,
    remove_file,
    replace_bytes,
    scratch_name,
    why_not_private,
)

LIMIT = "REALIGN_CACHE_GB"
"""Environment variable with the size limit of a folder in GB: a property of the machine, and of no run."""
DEFAULT_GB = 10.0


def cache_folder() -> Path:
    """Return the folder of cached files: `realign` in XDG_CACHE_HOME, or in `~/.cache`."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(home) / "realign").expanduser()


def size_limit() -> int:
    """Return the size limit of a folder in bytes, with what killed writers left.

    Raises:
        ConfigError: the environment variable is not a number of at least 0.
    """
    text = os.environ.get(LIMIT) or str(DEFAULT_GB)
    with suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return int(float(text) * 1e9)
    raise ConfigError(f"{LIMIT}={text!r}: expected a number of gigabytes, 0 or larger. The default is {DEFAULT_GB:g}.")


class Cache:
    """A folder of files in the user's cache, or in a folder that the user named.

    Neither reading nor writing raises an error. A folder that another user can write to counts as empty, and a file
    that's no regular one as missing. A file that cannot be written, since the disk or the cache is full, is computed
    again by the next run; this is said once. Nothing is ever removed.
    """

    def __init__(self, *names: str, root: Path | None = None, limit: int | None = None, quiet: bool = False) -> None:
        """Open a folder.

        Args:
            names: its path below `root`.
            root: the first folder that must be private; None: the user's cache folder.
            limit: the largest size of the folder in bytes; None: `size_limit`.
            quiet: say nothing when files can't be written.

        Raises:
            ConfigError: see `size_limit`.
        """
        self.root = root or cache_folder()
        self.folder = self.root.joinpath(*names)
        self._limit = size_limit() if limit is None else limit
        self._unsummed = self._limit  # bytes written since the sizes were last summed; the first write sums them
        self._full, self._quiet = self._limit == 0, quiet

    def why_not(self, folder: Path | None = None) -> str | None:
        """Return why the folder, or one below it, can't be used; None if no other user can write to it.

        Raises:
            OSError: it does not exist.
        """
        return next(filter(None, map(why_not_private, self._parts(folder or self.folder))), None)

    def make(self, folder: Path | None = None) -> str | None:
        """Make the folder, private whatever the umask, and return `why_not`.

        Raises:
            OSError: it can't be made.
        """
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for part in self._parts(folder or self.folder):
            part.mkdir(mode=0o700, exist_ok=True)  # `parents=True` would give the mode to the last one only
            if (why := why_not_private(part)) is not None:  # before the next one, since a link may lead anywhere
                return why
        return None

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is none, or another user could have written it."""
        path = self.folder / name
        with suppress(OSError, ConfigError):
            if self.why_not(path.parent) is None and why_not_private(path) is None:
                with open_regular(path, os.O_RDONLY, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                return read_regular(path, size) or None
        return None

    def write(self, name: str, content: bytes) -> bool:
        """Write a file, of which other processes see all or nothing, and return whether it was written."""
        path = self.folder / name
        self._unsummed += len(content)
        try:
            if not self._full and self._unsummed > self._limit // 100:  # summing for each entry would be quadratic
                self._unsummed = 0
                self._full = _size(self.folder) + len(content) > self._limit
                if self._full:
                    self._say(f"the cache is full ({LIMIT}={self._limit / 1e9:g}). Remove {self.root} to start anew")
            if self._full or len(content) > self._limit:
                return False
            if (why := self.make(path.parent)) is None:
                replace_bytes(path, content, mode=0o600)
                return True
        except OSError as error:
            why = f"{path.parent} is not writable ({error.strerror})"
        self._full = True
        self._say(why)
        return False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process is in this context. Does nothing without such locks, or without the folder."""
        with ExitStack() as stack:
            with suppress(ImportError, OSError):
                import fcntl

                if self.make() is None:
                    number = os.open(self.folder, os.O_RDONLY)
                    stack.callback(os.close, number)  # ends the lock, as the end of the process does
                    fcntl.flock(number, fcntl.LOCK_EX)
            yield

    def store(self, name: str, source: Path) -> Path:
        """Copy a file into the folder, and return its path.

        Raises:
            ConfigError: another user could write to the folder.
            OSError: the folder is not writable, or the disk is full.
        """
        if (why := self.make()) is not None:
            raise ConfigError(f"{why}. Make it private, or select another folder with XDG_CACHE_HOME.")
        path = self.folder / name
        new = scratch_name(path)
        try:
            copy_file(source, new)
            move(new, path)
        except BaseException:
            remove_file(new)
            raise
        return path

    def _parts(self, folder: Path) -> Iterator[Path]:
        """Yield the folders from the root to this one."""
        yield self.root
        for i in range(len(folder.relative_to(self.root).parts)):
            yield self.root.joinpath(*folder.relative_to(self.root).parts[: i + 1])

    def _say(self, why: str) -> None:
        if not self._quiet:
            warnings.warn(f"Nothing more is cached in {self.folder}: {why}. This costs only time.", stacklevel=4)


def _size(path: Path) -> int:
    """Return the size of all files below a folder, without following links."""
    total = 0
    with suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += _size(Path(entry.path))
            else:
                with suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_size
    return total
