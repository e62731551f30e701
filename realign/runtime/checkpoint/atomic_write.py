"""Write a checkpoint folder atomically.

`write_checkpoint` fills `checkpoints/.step_000010.<random>`, syncs every file and the folder to disk, and renames
the folder to `step_000010`. If a process dies at any moment, the earlier checkpoints stay unchanged. It may leave a
folder whose name starts with a dot. The next start or write removes that folder. Only one process may write into a
folder at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realign.engines.files.folders import make_folder, sync_folder
from realign.runtime.checkpoint.folder import (
    FORMAT,
    MANIFEST,
    PARTS,
    REPLACED,
    STATE,
    TENSORS,
    Checkpoint,
    folder_name,
    rendered_manifest,
)
from realign.runtime.checkpoint.serialize import Packed, Tree, pack, write_tensors
from realign.version import installed_version

LEFTOVER = re.compile(r"\.(step_[0-9]+)\.\w+")


def write_checkpoint(folder: Path, step: int, tree: Tree) -> Checkpoint:
    """Write `folder/step_<step>`, and replace an existing checkpoint of the same step.

    Raises:
        ValueError: The tree contains a value that cannot be serialized.
        OSError: The disk is full or the folder is not writable. Existing checkpoints are unchanged.
    """
    return write_packed(folder, step, pack(tree, copy=False))


@dataclass(frozen=True)
class Begun:
    """A temporary checkpoint folder that contains the shards of all ranks."""

    folder: Path
    files: Mapping[str, Any]


def begin(folder: Path, step: int) -> Path:
    """Create and return a temporary folder for the checkpoint of a step."""
    if step < 0:
        raise ValueError(f"step={step}: must be at least 0")
    make_folder(folder)
    remove_leftovers(folder)
    temporary = folder / f".{folder_name(step)}.{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary


def write_packed(folder: Path, step: int, packed: Packed, begun: Begun | None = None) -> Checkpoint:
    """Write a packed tree as `write_checkpoint` does, into the temporary folder `begun` if there is one."""
    if packed.parts and begun is None:
        raise ValueError(f"{next(iter(packed.parts))}: the tensor is sharded across ranks. Use a CheckpointWriter.")
    begun = begun or Begun(begin(folder, step), {})
    try:
        _fill(begun, step, packed)
        return _publish(begun.folder, folder, step)
    except BaseException:
        shutil.rmtree(begun.folder, ignore_errors=True)
        raise


def _fill(begun: Begun, step: int, packed: Packed) -> None:
    folder, files = begun.folder, dict(begun.files)
    with HashedFile(folder / TENSORS) as file:
        write_tensors(file.write, packed.tensors)
    files[TENSORS] = file.facts
    with HashedFile(folder / STATE) as file:
        file.write(json.dumps(packed.state, allow_nan=False).encode() + b"\n")
    files[STATE] = file.facts
    with HashedFile(folder / MANIFEST) as file:
        file.write(rendered_manifest({"format": FORMAT, "realign": installed_version(), "step": step, "files": files}))
    if begun.files:
        sync_folder(folder / PARTS)
    sync_folder(folder)


def facts_of(path: Path) -> dict[str, Any]:
    """Return the manifest entry of an existing file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _publish(temporary: Path, folder: Path, step: int) -> Checkpoint:
    """Rename a complete folder to its final name. An older checkpoint of the step stays readable until then."""
    path = folder / folder_name(step)
    aside = folder / f".{path.name}.{REPLACED}"
    if path.exists():
        path.rename(aside)
    temporary.rename(path)
    sync_folder(folder)
    sync_folder(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)
    return Checkpoint(path, step)


class HashedFile:
    """A new file that is hashed while it is written, and synced to disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self._bytes = 0

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, part: bytes | memoryview) -> None:
        """Append to the file."""
        self._file.write(part)
        self._hash.update(part)
        self._bytes += len(part)

    @property
    def facts(self) -> dict[str, Any]:
        """Manifest entry of the file."""
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}


def remove(checkpoint: Checkpoint) -> None:
    """Remove a checkpoint. Rename it first, so that an interrupted removal does not leave a corrupt checkpoint."""
    aside = checkpoint.path.with_name(f".{folder_name(checkpoint.step)}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.path.rename(aside)
    shutil.rmtree(aside)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of writes that were interrupted."""
    for path in folder.iterdir() if folder.is_dir() else []:
        match = LEFTOVER.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        if path.name.endswith(f".{REPLACED}") and not (folder / match[1]).exists():
            continue  # the only complete checkpoint of its step
        shutil.rmtree(path, ignore_errors=True)
