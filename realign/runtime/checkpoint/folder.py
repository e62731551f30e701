"""Read checkpoints: everything a run needs to resume bit for bit, in a folder that is verified when it is read.

The folder `checkpoints/step_000010` contains

- `state.json` and `tensors.safetensors`: the tree (`realign.runtime.checkpoint.serialize`),
- `parts/*.safetensors`: each rank's shards of the tensors that are sharded across ranks
  (`realign.engines.distributed.sharding`),
- `manifest.json`: format, version of realign, step, size (bytes) and sha256 of each file, and sha256 of the manifest.

`realign.runtime.checkpoint.atomic_write` writes the folders.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realign.engines.distributed.sharding import read_saved
from realign.errors import CheckpointError
from realign.runtime.checkpoint.serialize import read_tensors, unpack

FORMAT = 1
MANIFEST, STATE, TENSORS, PARTS = "manifest.json", "state.json", "tensors.safetensors", "parts"
PART = re.compile(rf"{PARTS}/[\w.-]+\.safetensors")
REPLACED = "replaced"
"""Suffix of the old checkpoint folder while a new one for the same step is moved into place."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint that cannot be used. The message names the file and the problem."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, whose content is not loaded."""

    path: Path
    step: int

    def read(self) -> dict[str, Any]:
        """Verify and read the tree that was written.

        Tensors are on the CPU and contiguous. Tensors that shared memory when they were written share memory again.
        The number of processes may differ from the number that wrote the checkpoint. A tensor that was sharded is
        returned as a `Saved`: each process reads the slice that it needs, as long as the checkpoint exists.

        Named tuples are returned as tuples, and enum members as their values.

        Raises:
            CorruptCheckpoint: A file is missing, its content changed, or it is not a file of a checkpoint.
        """
        files = self._manifest()
        for name, (size, digest) in files.items():
            self._check(name, size, digest)
        with self._reading(TENSORS):
            tensors: dict[str, Any] = dict(read_tensors(self.path / TENSORS))
        if files.keys() - {STATE, TENSORS}:
            with self._reading(PARTS):
                tensors |= read_saved(self.path / PARTS)
        with self._reading(STATE):
            return unpack(json.loads((self.path / STATE).read_bytes()), tensors)

    def _manifest(self) -> dict[str, tuple[int, str]]:
        """Return size in bytes and sha256 of each file."""
        self._check_regular(MANIFEST)
        with self._reading(MANIFEST):
            data = (self.path / MANIFEST).read_bytes()
            manifest = json.loads(data)
            if not isinstance(manifest, dict) or "format" not in manifest:
                raise ValueError("not a manifest of a checkpoint")
            if manifest["format"] != FORMAT:
                writer = f"by realign {manifest.get('realign')}"
                raise ValueError(f"written in format {manifest['format']!r} {writer}; this version reads {FORMAT}")
            manifest.pop("sha256", None)
            if data != rendered_manifest(manifest):
                raise ValueError("sha256 mismatch")
            if manifest["step"] != self.step:
                raise ValueError(f"the manifest is of step {manifest['step']}, but the folder is of step {self.step}")
            names = {name for name in manifest["files"] if not PART.fullmatch(name)}
            if names != {STATE, TENSORS}:
                raise ValueError(
                    f"the manifest must list {STATE} and {TENSORS}, found {', '.join(sorted(names)) or 'no files'}"
                )
            return {name: (facts["bytes"], facts["sha256"]) for name, facts in manifest["files"].items()}

    def _check(self, name: str, size: int, digest: str) -> None:
        found = self._check_regular(name)
        if found != size:
            raise CorruptCheckpoint(f"{self.path / name}: {found} bytes, expected {size}")
        with self._reading(name), (self.path / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise ValueError("the file was changed after it was written (sha256 mismatch)")

    def _check_regular(self, name: str) -> int:
        path = self.path / name
        try:
            found = path.lstat()
        except OSError as error:
            raise CorruptCheckpoint(f"{path}: missing ({error.strerror})") from error
        if not stat.S_ISREG(found.st_mode):
            raise CorruptCheckpoint(f"{path}: not a regular file")
        return found.st_size

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except KeyError as error:
            raise CorruptCheckpoint(f"{self.path / name}: missing key {error}") from error
        except CorruptCheckpoint:
            raise
        except (CheckpointError, ValueError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise CorruptCheckpoint(f"{self.path / name}: {error}") from error


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of a folder, sorted by step, newest last. Ignore links and folders with other names."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:  # dot names sort first, so `step_` wins
        name = path.name.removeprefix(".").removesuffix(f".{REPLACED}")
        step = int(name[5:]) if re.fullmatch(r"step_[0-9]{6,}", name) else -1
        names = (folder_name(step), f".{folder_name(step)}.{REPLACED}")
        if path.name in names and path.is_dir() and not path.is_symlink():
            found[step] = Checkpoint(path, step)
    return [found[step] for step in sorted(found)]


def newest(folder: Path, warn: Callable[[str], None]) -> tuple[Checkpoint, dict[str, Any]] | None:
    """Return the newest readable checkpoint and its tree, or None if the folder has no checkpoint.

    Args:
        folder: Folder that was passed to `write_checkpoint`.
        warn: Called with a message for each checkpoint that is skipped.

    Raises:
        CorruptCheckpoint: The folder has checkpoints, but none can be read.
    """
    found = list_checkpoints(folder)
    problems = []
    for checkpoint in reversed(found):
        try:
            return checkpoint, checkpoint.read()
        except CorruptCheckpoint as error:
            problems.append(str(error))
            warn(f"Checkpoint at step {checkpoint.step} cannot be read ({error}). Trying the previous checkpoint.")
    if problems:
        raise CorruptCheckpoint(f"No checkpoint in {str(folder)!r} can be read: {'; '.join(problems)}.")
    return None


def folder_name(step: int) -> str:
    """Return the name of the checkpoint folder of a step."""
    return f"step_{step:06d}"


def rendered_manifest(manifest: dict[str, Any]) -> bytes:
    """Return the manifest as bytes, including the sha256 of its canonical JSON."""
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    whole = {**manifest, "sha256": hashlib.sha256(canonical).hexdigest()}
    return json.dumps(whole, sort_keys=True, indent=2).encode() + b"\n"
