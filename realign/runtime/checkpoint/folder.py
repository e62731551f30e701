"""Checkpoints: everything a run needs to resume bit for bit, in a folder that is written atomically.

`write_checkpoint` fills `checkpoints/.step_000010.<random>`, syncs every file and the folder to disk, and renames
the folder to `step_000010`. The folder contains

- `state.json` and `tensors.safetensors`: the tree (`realign.runtime.checkpoint.serialize`),
- `parts/*.safetensors`: each rank's shards of the tensors that are sharded across ranks
  (`realign.engines.distributed.shards`),
- `manifest.json`: format, version of realign, step, size (bytes) and sha256 of each file, and sha256 of the manifest.

If a process dies at any moment, the earlier checkpoints stay unchanged. It may leave a folder whose name starts with
a dot; the next start or write removes that folder. Only one process may write into a folder at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from realign.engines.distributed.ranks import Ranks
from realign.engines.distributed.shards import read_saved, write_parts
from realign.runtime.checkpoint.serialize import Packed, Tree, pack, read_tensors, unpack, write_tensors

FORMAT = 1
MANIFEST, STATE, TENSORS, PARTS = "manifest.json", "state.json", "tensors.safetensors", "parts"
LEFTOVER = re.compile(r"\.(step_[0-9]+)\.\w+")
PART = re.compile(rf"{PARTS}/[\w.-]+\.safetensors")
REPLACED = "replaced"
"""Suffix of the old checkpoint folder while a new one for the same step is moved into place."""


class CorruptCheckpoint(ValueError):
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
                raise ValueError("no manifest of a checkpoint")
            if manifest["format"] != FORMAT:
                writer = f"by realign {manifest.get('realign')}"
                raise ValueError(f"written in format {manifest['format']!r} {writer}; this version reads {FORMAT}")
            manifest.pop("sha256", None)
            if data != _rendered(manifest):
                raise ValueError("its sha256 differs")
            if manifest["step"] != self.step:
                raise ValueError(f"it is of step {manifest['step']}, but the folder is of step {self.step}")
            names = {name for name in manifest["files"] if not PART.fullmatch(name)}
            if names != {STATE, TENSORS}:
                raise ValueError(f"it must list {STATE} and {TENSORS}, found {', '.join(sorted(names))}")
            return {name: (facts["bytes"], facts["sha256"]) for name, facts in manifest["files"].items()}

    def _check(self, name: str, size: int, digest: str) -> None:
        found = self._check_regular(name)
        if found != size:
            raise CorruptCheckpoint(f"{self.path / name}: {found} bytes, where {size} were written")
        with self._reading(name), (self.path / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise ValueError("its sha256 differs from what was written")

    def _check_regular(self, name: str) -> int:
        path = self.path / name
        try:
            found = path.lstat()
        except OSError as error:
            raise CorruptCheckpoint(f"{path}: missing ({error.strerror})") from error
        if not stat.S_ISREG(found.st_mode):
            raise CorruptCheckpoint(f"{path}: no plain file")
        return found.st_size

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except KeyError as error:
            raise CorruptCheckpoint(f"{self.path / name}: no {error}") from error
        except (ValueError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise CorruptCheckpoint(f"{self.path / name}: {error}") from error


def write_checkpoint(folder: Path, step: int, tree: Tree) -> Checkpoint:
    """Write `folder/step_<step>`, and replace an existing checkpoint of the same step.

    Raises:
        ValueError: The tree contains a value that cannot be serialized.
        OSError: The disk is full or the folder is not writable. Existing checkpoints are unchanged.
    """
    return _write(folder, step, pack(tree, copy=False))


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of a folder, sorted by step, newest last. Ignore links and folders with other names."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:  # dot names sort first, so `step_` wins
        name = path.name.removeprefix(".").removesuffix(f".{REPLACED}")
        step = int(name[5:]) if re.fullmatch(r"step_[0-9]{6,}", name) else -1
        if path.name in (_name(step), f".{_name(step)}.{REPLACED}") and path.is_dir() and not path.is_symlink():
            found[step] = Checkpoint(path, step)
    return [found[step] for step in sorted(found)]


def newest(folder: Path, warn: Callable[[str], None]) -> tuple[Checkpoint, dict[str, Any]] | None:
    """Return the newest readable checkpoint and its tree, or None if the folder has no checkpoint.

    Args:
        folder: Folder that was passed to `write_checkpoint`.
        warn: Called with a message for each checkpoint that is skipped.

    Raises:
        ValueError: The folder has checkpoints, but none can be read.
    """
    found = list_checkpoints(folder)
    problems = []
    for checkpoint in reversed(found):
        try:
            return checkpoint, checkpoint.read()
        except CorruptCheckpoint as error:
            problems.append(str(error))
            warn(f"the checkpoint of step {checkpoint.step} is skipped: {error}")
    if problems:
        raise ValueError(f"none of the checkpoints in {str(folder)!r} can be read: {'; '.join(problems)}")
    return None


class CheckpointWriter:
    """Writes checkpoints in a background thread while training continues, at most one at a time.

    In distributed training, rank 0 writes. If tensors are sharded, each rank writes its shards before `write` returns,
    because no other collective may run during that time.

    After a checkpoint is complete, older ones are removed, except the `keep` latest and the best one. Checkpoints of
    later steps are removed too: they remain from before the run was resumed at an earlier step.
    """

    def __init__(self, folder: Path, keep: int, ranks: Ranks | None = None) -> None:
        """Create a writer, and remove leftovers of interrupted writes from `folder`.

        Args:
            folder: Folder on a disk that all processes share.
            keep: Number of checkpoints to keep.
            ranks: Processes that call `write` together. None means this process only.

        Raises:
            ValueError: `keep` is less than 1.
        """
        if keep < 1:
            raise ValueError(f"checkpoint.keep must be at least 1, found {keep}")
        self._folder, self._keep, self._ranks = folder, keep, ranks or Ranks()
        self._failures: list[str] = []
        self._thread: threading.Thread | None = None
        self._ranks.lead(partial(_remove_leftovers, folder))

    def write(self, step: int, tree: Tree, *, best: int | None = None) -> float:
        """Copy the tensors of `tree` and write them in the background, after an earlier write is finished.

        Args:
            step: Step of the checkpoint.
            tree: Content of the checkpoint.
            best: Step whose checkpoint is kept regardless of its age.

        Returns:
            Seconds for which training was blocked.

        Raises:
            ValueError: The tree contains a value that cannot be serialized.
            OSError: A rank could not write its shards.
        """
        start = time.perf_counter()
        self.close()
        packed = self._ranks.together(partial(pack, tree, copy=self._ranks.leader))
        begun = self._write_parts(step, packed.parts) if packed.parts else None
        if self._ranks.leader:
            # a daemon thread: a run that is interrupted twice exits without waiting for the write
            self._thread = threading.Thread(
                target=self._store, args=(step, packed, best, begun), name=f"checkpoint-{step}", daemon=True
            )
            self._thread.start()
        return time.perf_counter() - start

    def _write_parts(self, step: int, parts: Mapping[str, Tensor]) -> _Begun:
        """Write the shards of all ranks into a temporary folder (collective)."""
        folder = self._ranks.lead(partial(_begin, self._folder, step))

        def write() -> dict[str, Any]:
            return {f"{PARTS}/{path.name}": _facts(path) for path in write_parts(folder / PARTS, parts)}

        try:
            written = self._ranks.gather(self._ranks.together(write))
            files = {name: facts for of_rank in written for name, facts in of_rank.items()}
            self._ranks.lead(partial(_check_shared, folder, files))
        except BaseException:
            if self._ranks.leader:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return _Begun(folder, files)

    def failed(self) -> list[str]:
        """Return and clear the error messages of failed writes, such as a full disk."""
        messages = self._failures[:]
        del self._failures[: len(messages)]
        return messages

    def close(self) -> None:
        """Wait until the current write is finished."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _store(self, step: int, packed: Packed, best: int | None, begun: _Begun | None) -> None:
        stands: list[str] = []
        try:
            stands = [str(checkpoint.step) for checkpoint in list_checkpoints(self._folder)]
            _write(self._folder, step, packed, begun)
        except Exception as error:  # training continues without this checkpoint
            left = f"those before stand (steps {', '.join(stands)})" if stands else "there is none yet"
            self._failures.append(f"the checkpoint of step {step} was not written: {error}; {left}")
            return
        try:
            self._remove_old(step, best)
        except OSError as error:
            self._failures.append(f"an old checkpoint could not be removed: {error}")

    def _remove_old(self, step: int, best: int | None) -> None:
        found = list_checkpoints(self._folder)
        kept = [c for c in found if c.step <= step][-self._keep :] + [c for c in found if c.step == best]
        for checkpoint in found:
            if checkpoint not in kept:
                _remove(checkpoint)


def _name(step: int) -> str:
    return f"step_{step:06d}"


@dataclass(frozen=True)
class _Begun:
    """A temporary checkpoint folder that contains the shards of all ranks."""

    folder: Path
    files: Mapping[str, Any]


def _begin(folder: Path, step: int) -> Path:
    """Create and return a temporary folder for the checkpoint of a step."""
    if step < 0:
        raise ValueError(f"the step of a checkpoint must be at least 0, found {step}")
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    temporary = folder / f".{_name(step)}.{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary


def _write(folder: Path, step: int, packed: Packed, begun: _Begun | None = None) -> Checkpoint:
    if packed.parts and begun is None:
        raise ValueError(f"{next(iter(packed.parts))}: several processes divide it; a CheckpointWriter can keep it")
    begun = begun or _Begun(_begin(folder, step), {})
    try:
        _fill(begun, step, packed)
        return _publish(begun.folder, folder, step)
    except BaseException:
        shutil.rmtree(begun.folder, ignore_errors=True)
        raise


def _fill(begun: _Begun, step: int, packed: Packed) -> None:
    folder, files = begun.folder, dict(begun.files)
    with _HashedFile(folder / TENSORS) as file:
        write_tensors(file.write, packed.tensors)
    files[TENSORS] = file.facts
    with _HashedFile(folder / STATE) as file:
        file.write(json.dumps(packed.state, allow_nan=False).encode() + b"\n")
    files[STATE] = file.facts
    with _HashedFile(folder / MANIFEST) as file:
        file.write(_rendered({"format": FORMAT, "realign": version("realign"), "step": step, "files": files}))
    if begun.files:
        _sync_folder(folder / PARTS)
    _sync_folder(folder)


def _facts(path: Path) -> dict[str, Any]:
    """Return the manifest entry of an existing file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _check_shared(folder: Path, files: Mapping[str, Any]) -> None:
    for name in files:
        if not (folder / name).is_file():
            raise OSError(f"{name} of another process is not there: output_dir must lie on a disk that all share")


def _publish(temporary: Path, folder: Path, step: int) -> Checkpoint:
    """Rename a complete folder to its final name. An older checkpoint of the step stays readable until then."""
    path = folder / _name(step)
    aside = folder / f".{path.name}.{REPLACED}"
    if path.exists():
        path.rename(aside)
    temporary.rename(path)
    _sync_folder(folder)
    _sync_folder(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)
    return Checkpoint(path, step)


class _HashedFile:
    """A new file that is hashed while it is written, and synced to disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self._bytes = 0

    def __enter__(self) -> _HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, part: bytes | memoryview) -> None:
        self._file.write(part)
        self._hash.update(part)
        self._bytes += len(part)

    @property
    def facts(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}


def _rendered(manifest: dict[str, Any]) -> bytes:
    """Return the manifest as bytes, including the sha256 of its canonical JSON."""
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    whole = {**manifest, "sha256": hashlib.sha256(canonical).hexdigest()}
    return json.dumps(whole, sort_keys=True, indent=2).encode() + b"\n"


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _remove(checkpoint: Checkpoint) -> None:
    """Remove a checkpoint. Rename it first, so that an interrupted removal does not leave a corrupt checkpoint."""
    aside = checkpoint.path.with_name(f".{_name(checkpoint.step)}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.path.rename(aside)
    shutil.rmtree(aside)


def _remove_leftovers(folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else []:
        match = LEFTOVER.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        if path.name.endswith(f".{REPLACED}") and not (folder / match[1]).exists():
            continue  # the only complete checkpoint of its step
        shutil.rmtree(path, ignore_errors=True)
