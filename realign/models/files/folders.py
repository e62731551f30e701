"""Folders that a run writes: valid names, regular files, saves that are complete or absent, and state files.

After a power loss, a file has its content only if it was synced to disk, and its name only if its folder was synced.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from realign.errors import ConfigError, TransientError
from realign.models.files.model_folder import parse_object
from realign.own_files import (
    FILES,
    OwnFiles,
    SavedHere,
    make_folder,
    not_regular,
    refuse_link,
    remove_scratch,
    replace_bytes,
    set_aside,
    sync_folder,
    sync_tree,
)

AVERAGED = "_ema"
"""Suffix of the folder with averaged weights, after the name of the model folder."""

_RUN_FILES = (
    *("config.yaml", "metrics.jsonl", "samples.jsonl", "eval_samples.jsonl", "curves.png", "last_failure.json"),
    *("tokens.jsonl", "spans.jsonl", "warnings.jsonl", "system.jsonl", "run.json", "summary.json"),
    *("calls", "calls/*.safetensors"),
    *("final", "final/*", "best", "best/*", "step_*", "step_*/*", "checkpoints", "checkpoints/step_*"),
    *("tensorboard", "realign.log", ".hydra", ".hydra/*.yaml", FILES),
)
"""Glob patterns of the files and folders that a run writes into its output folder."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Error codes of a full disk."""

_NEW, _OLD = "new", "old"


class DiskFullError(TransientError, OSError):
    """The disk is full. A restart can succeed once there is free space."""


def check_name(what: str, name: str) -> None:
    """Check that a name (of a role, a run or a tracker) is valid as the name of one file or folder.

    Raises:
        ConfigError: the name is empty, longer than 100 bytes, starts with a dot or dash, starts or ends with a blank,
            or contains a separator or control character.
    """
    fits = 0 < len(name.encode(errors="replace")) <= 100 and name.isprintable() and name == name.strip()
    if not fits or name[0] in ".-" or "/" in name or "\\" in name:
        raise ConfigError(
            f"{what} {name!r} is not a valid file name. Use up to 100 characters without / \\ or control characters. "
            "Do not start with a dot, dash or blank."
        )


def check_run_folder(folder: Path) -> None:
    """Check that a run's files are regular files and folders.

    Through a link, the run would write or remove files outside its folder. A pipe would block it. The folder itself
    may be a link, for example to a larger disk.

    Raises:
        ConfigError: there is a link, pipe, device or socket. The message names it, and the target of a link.
    """
    for pattern in _RUN_FILES:
        for path in _entries(folder, pattern):
            refuse_link(path)
            mode = path.lstat().st_mode
            named = Path(pattern).suffix and not stat.S_ISREG(mode)  # such as metrics.jsonl
            if named or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise not_regular(path)


def _entries(folder: Path, pattern: str) -> list[Path]:
    """Return the paths that match a pattern, including dangling links, which `Path.glob` omits."""
    first, _, rest = pattern.partition("/")
    matches = [path for path in folder.iterdir() if fnmatchcase(path.name, first)] if folder.is_dir() else []
    return [inner for path in matches for inner in _entries(path, rest)] if rest else matches


class NewFolder:
    """A folder of a model that is being written, beside the folder that it becomes when it is complete.

    If the process is killed, a temporary folder can remain, which `restore_interrupted_saves` removes.
    """

    def __init__(self, path: Path, own: OwnFiles | None = None) -> None:
        """Create a temporary folder on the disk of `path`.

        Args:
            path: the folder.
            own: the files of the run that saves `path`; None for a path that somebody named, where no list is kept.

        Raises:
            ConfigError: `path` is a link.
        """
        refuse_link(path)
        make_folder(path.parent)
        self._target, self._own = path, own or SavedHere(path.parent)
        # Beside `path`, since a rename is atomic only within a disk.
        with saving(path):
            self._scratch = self._own.scratch(path.name)
        self.path = self._scratch / _NEW
        """Where the files go; the caller creates this folder."""

    def publish(self) -> None:
        """Rename the folder, so that it replaces an earlier one; afterward, its files and its name are on the disk."""
        # Before the rename: after a power loss, a name on the disk could otherwise stand for files without content.
        with saving(self._target):
            sync_tree(self.path)
            self._own.record(self._target.name, self.path)
        _replace(self._target, self.path, self._scratch / _OLD, self._own)

    def remove(self) -> None:
        """Remove what is left of the temporary folder."""
        remove_scratch(self._scratch)


def save_folder(path: Path, write: Callable[[Path], None], own: OwnFiles | None = None) -> None:
    """Call `write` with a temporary folder and rename it to `path`, so that `path` never contains a partial model.

    The folder is on the disk when this function returns, as long as the disk keeps what is synced. An earlier folder is
    replaced if it has only files in `own`, or without `own`, only files that this process saved. Otherwise it is
    renamed, such as to `final.1`.

    Raises:
        ConfigError: `path` is a link.
        DiskFullError: the disk is full; `path` is unchanged.
        OSError: the disk is not writable; `path` is unchanged.
    """
    folder = NewFolder(path, own)
    try:
        with saving(path):
            write(folder.path)
        folder.publish()
    finally:
        folder.remove()


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Say in errors of the disk that the folder `path` was not saved."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # a full disk can also raise SafetensorError
        kind = DiskFullError if _is_full(error) else OSError
        raise kind(f"{path} was not saved: {error.__cause__ or error}") from error


def _replace(path: Path, new: Path, old: Path, own: OwnFiles) -> None:
    """Rename `new` to `path`. An existing folder is renamed to `old`, and back if this fails."""
    if (stranger := own.stranger(path.name)) is not None:
        aside = set_aside(path)
        warnings.warn(f"{stranger} was not written by this run, so {path} was moved to {aside}.", stacklevel=4)
    # A folder with files can't be replaced by a rename, so the old one goes aside first. `restore_interrupted_saves`
    # brings it back if the process ends between the two renames.
    if path.exists():
        path.rename(old)
    try:
        new.rename(path)
    # Also after Ctrl-C.
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    sync_folder(path.parent)


def restore_interrupted_saves(folder: Path) -> None:
    """Remove what killed calls of `save_folder` and `OwnFiles.remove` left in the folder of a run.

    If a save was killed between its two renames, the earlier folder exists only in the temporary folder. It is moved
    back. Call this only under the lock of the run folder.
    """
    for scratch in OwnFiles(folder).scratches():
        old, target = scratch / _OLD, folder / scratch.name[1:].rpartition(".")[0]
        if old.is_dir() and not old.is_symlink() and not os.path.lexists(target):
            old.rename(target)
            sync_folder(folder)
            warnings.warn(f"{target} was restored, since the save that replaces it was interrupted.", stacklevel=3)
        remove_scratch(scratch)


def _is_full(error: BaseException) -> bool:
    """Return whether a disk or quota without free space caused the error."""
    causes = (error, error.__cause__)
    texts = tuple(os.strerror(code) for code in _NO_SPACE)  # SafetensorError has no errno
    return any(getattr(e, "errno", None) in _NO_SPACE or any(text in str(e) for text in texts) for e in causes)


def _state_file(role: str | None = None) -> str:
    """Return the name of the file with the interface state saved with a model; `role` names a view of the model."""
    return "interface_state.json" if role is None else f"interface_state_{role}.json"


def write_state(folder: Path, state: Mapping[str, Any], role: str | None = None) -> None:
    """Write the `state_dict` of an interface as JSON to its model folder; write nothing if it is empty."""
    if not state:
        return
    replace_bytes(folder / _state_file(role), json.dumps(state, indent=2).encode() + b"\n", sync=True)


def read_states(path: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Read the interface states that `write_state` saved in a local model folder.

    Returns:
        The state of the model's own role, and the states of the roles that share the model. Both are empty if the
        folder has no state files, and for a hub name.

    Raises:
        DataError: a file does not contain a JSON object.
    """
    prefix, suffix = _state_file("").split(".")
    files = {f.stem.removeprefix(prefix): f for f in sorted(Path(path).expanduser().glob(f"{prefix}?*.{suffix}"))}
    own = Path(path).expanduser() / _state_file()
    return parse_object(own) if own.is_file() else {}, {role: parse_object(file) for role, file in files.items()}
