"""The folder of a checkpoint: everything a run needs to resume bit for bit, written atomically, verified when read.

The folder `checkpoints/step_000010` contains

- `state.json` and `tensors.safetensors`: the tree (`realign.records.checkpoint.serialize`),
- `parts/*.safetensors`: each rank's shards of the tensors that are sharded across ranks
  (`realign.engines.distributed.shard_files`),
- `manifest.json`: format, version of realign, step, size (bytes) and sha256 of each file, and sha256 of the manifest.

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
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from realign.engines.distributed.shard_files import file_of, read_saved, shards_to_write
from realign.errors import CheckpointError
from realign.own_files import OwnFiles, make_folder, open_new, remove_scratch, set_aside, sync_folder
from realign.ranks import Ranks
from realign.records.checkpoint.serialize import Packed, Tree, pack, read_tensors, unpack, write_tensors
from realign.version import installed_version

CHECKPOINTS = "checkpoints"
"""Name of the checkpoint folder inside `output_dir`."""
_FORMAT = 1
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
            if manifest["format"] != _FORMAT:
                writer = f"by realign {manifest.get('realign')}"
                raise ValueError(f"written in format {manifest['format']!r} {writer}; this version reads {_FORMAT}")
            manifest.pop("sha256", None)
            # all bytes, not just the values: any change of a file is reported, even if it means the same
            if data != render_manifest(manifest):
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
        actual_size = self._check_regular(name)
        if actual_size != size:
            raise CorruptCheckpoint(f"{self.path / name}: {actual_size} bytes, expected {size}")
        with self._reading(name), (self.path / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise ValueError("the file was changed after it was written (sha256 mismatch)")

    def _check_regular(self, name: str) -> int:
        path = self.path / name
        try:
            status = path.lstat()
        except OSError as error:
            raise CorruptCheckpoint(f"{path}: missing ({error.strerror})") from error
        if not stat.S_ISREG(status.st_mode):
            raise CorruptCheckpoint(f"{path}: not a regular file")
        return status.st_size

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


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run resumes from."""

    checkpoint: Checkpoint
    state: Mapping[str, Any]
    own: bool
    """Whether the checkpoint is in this run's own folder, so that its record files are continued."""
    new_run: bool
    """Whether this is a new run that counts from step 0 and does not continue the record files."""
    complete: bool = False
    """Whether no step is left, and only the saved models of the run are missing or damaged."""

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return 0 if self.new_run else self.checkpoint.step

    @property
    def run(self) -> Path:
        """Folder of the run that wrote the checkpoint."""
        return self.checkpoint.path.parent.parent


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of a folder, sorted by step, newest last. Ignore links and folders with other names."""
    by_step = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:  # dot names sort first, so `step_` wins
        name = path.name.removeprefix(".").removesuffix(f".{REPLACED}")
        step = int(name[5:]) if re.fullmatch(r"step_[0-9]{6,}", name) else -1
        # compared with the canonical name, because `step_0000010` also has the form of a name of step 10
        names = (folder_name(step), f".{folder_name(step)}.{REPLACED}")
        if path.name in names and path.is_dir() and not path.is_symlink():
            by_step[step] = Checkpoint(path, step)
    return [by_step[step] for step in sorted(by_step)]


def newest(folder: Path, warn: Callable[[str], None]) -> tuple[Checkpoint, dict[str, Any]] | None:
    """Return the newest readable checkpoint and its tree, or None if the folder has no checkpoint.

    Args:
        folder: Folder that was passed to `write_checkpoint`.
        warn: Called with a message for each checkpoint that is skipped.

    Raises:
        CorruptCheckpoint: The folder has checkpoints, but none can be read.
    """
    checkpoints = list_checkpoints(folder)
    problems = []
    for checkpoint in reversed(checkpoints):
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


def render_manifest(manifest: dict[str, Any]) -> bytes:
    """Return the manifest as bytes, including the sha256 of its canonical JSON."""
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    signed = {**manifest, "sha256": hashlib.sha256(canonical).hexdigest()}
    return json.dumps(signed, sort_keys=True, indent=2).encode() + b"\n"


def write_checkpoint(folder: Path, step: int, tree: Tree) -> Checkpoint:
    """Write `folder/step_<step>`, and replace an existing checkpoint of the same step.

    Raises:
        ValueError: The tree contains a value that cannot be serialized.
        OSError: The disk is full or the folder is not writable. Existing checkpoints are unchanged.
    """
    return write_packed(folder, step, pack(tree, copy=False))


@dataclass(frozen=True)
class UnfinishedCheckpoint:
    """A temporary checkpoint folder that contains the shards of all ranks."""

    folder: Path
    files: Mapping[str, Any]


def begin(folder: Path, step: int) -> Path:
    """Create and return a temporary folder for the checkpoint of a step."""
    if step < 0:
        raise ValueError(f"step={step}: must be at least 0")
    make_folder(folder)
    _remove_leftovers(folder)
    return OwnFiles(folder).scratch(folder_name(step))


def write_packed(folder: Path, step: int, packed: Packed, unfinished: UnfinishedCheckpoint | None = None) -> Checkpoint:
    """Write a packed tree as `write_checkpoint` does, into the temporary folder `unfinished` if there is one."""
    if packed.parts and unfinished is None:
        raise ValueError(f"{next(iter(packed.parts))}: the tensor is sharded across ranks. Use a CheckpointWriter.")
    unfinished = unfinished or UnfinishedCheckpoint(begin(folder, step), {})
    try:
        _fill(unfinished, step, packed)
        return _publish(unfinished.folder, folder, step)
    except BaseException:
        remove_scratch(unfinished.folder)
        raise


def _fill(unfinished: UnfinishedCheckpoint, step: int, packed: Packed) -> None:
    folder, files = unfinished.folder, dict(unfinished.files)
    with HashedFile(folder / TENSORS) as file:
        write_tensors(file.write, packed.tensors, {"format": "pt"})
    files[TENSORS] = file.facts
    with HashedFile(folder / STATE) as file:
        file.write(json.dumps(packed.state, allow_nan=False).encode() + b"\n")
    files[STATE] = file.facts
    # the manifest comes last, so a folder that has one has everything else
    with HashedFile(folder / MANIFEST) as file:
        file.write(render_manifest({"format": _FORMAT, "realign": installed_version(), "step": step, "files": files}))
    if unfinished.files:
        sync_folder(folder / PARTS)
    sync_folder(folder)


def facts_of(path: Path) -> dict[str, Any]:
    """Return the manifest entry of an existing file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _publish(temporary: Path, folder: Path, step: int) -> Checkpoint:
    """Rename a complete folder to its final name. An older checkpoint of the step stays readable until then."""
    name, own = folder_name(step), OwnFiles(folder)
    path, aside = folder / name, folder / f".{name}.{REPLACED}"
    if (stranger := own.stranger(name)) is not None:
        warnings.warn(f"{stranger} was not written by a run, so {path} was moved to {set_aside(path)}.", stacklevel=2)
    own.record(name, temporary)
    # a kill between the two renames leaves only `aside`, which `list_checkpoints` reads and `_remove_leftovers` spares
    replaces = path.exists()
    if replaces:
        path.rename(aside)
    temporary.rename(path)
    sync_folder(folder)
    # this may be the first checkpoint, whose folder `checkpoints` is new itself
    sync_folder(folder.parent)
    if replaces:
        with suppress(OSError):
            own.remove(name, aside.name)
    return Checkpoint(path, step)


class HashedFile:
    """A new file that is hashed while it is written, and synced to disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = open_new(path)
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


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of writes that were interrupted."""
    own = OwnFiles(folder)
    for path in own.scratches():
        remove_scratch(path)
    for path in folder.glob(f".step_*.{REPLACED}"):
        name = path.name[1 : -len(REPLACED) - 1]
        if (folder / name).exists():  # else it is the only complete checkpoint of its step
            own.remove(name, path.name)


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
            raise ValueError(f"keep={keep}: must be at least 1")
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
        # `begin` removes temporary folders, and would also remove that of a write in progress
        self.close()
        # only rank 0 writes the tensors that are not sharded, so only rank 0 needs a copy that training cannot change
        packed = self._ranks.together(partial(pack, tree, copy=self._ranks.leader))
        unfinished = self._write_parts(step, packed.parts) if packed.parts else None
        if self._ranks.leader:
            # a daemon thread: a run that is interrupted twice exits without waiting for the write
            self._thread = threading.Thread(
                target=self._store, args=(step, packed, best, unfinished), name=f"checkpoint-{step}", daemon=True
            )
            self._thread.start()
        return time.perf_counter() - start

    def _write_parts(self, step: int, parts: Mapping[str, Tensor]) -> UnfinishedCheckpoint:
        """Write the shards of all ranks into a temporary folder (collective)."""

        def create() -> Path:
            folder = begin(self._folder, step)
            (folder / PARTS).mkdir()
            return folder

        folder = self._ranks.lead(create)

        def write() -> dict[str, Any]:
            path = folder / PARTS / file_of(self._ranks.rank)
            if not path.parent.is_dir():
                raise OSError(f"{path.parent} of rank 0 is missing. Use an output_dir that all ranks share")
            with HashedFile(path) as file:
                write_tensors(file.write, *shards_to_write(parts, self._ranks))
            return {f"{PARTS}/{path.name}": file.facts}

        try:
            written = self._ranks.gather(self._ranks.together(write))
        except BaseException:
            if self._ranks.leader:
                remove_scratch(folder)
            raise
        return UnfinishedCheckpoint(folder, {name: facts for of_rank in written for name, facts in of_rank.items()})

    def take_failures(self) -> list[str]:
        """Return and clear the error messages of failed writes, such as a full disk."""
        # not `clear()`: the background thread may append between the two lines
        messages = self._failures[:]
        del self._failures[: len(messages)]
        return messages

    def close(self) -> None:
        """Wait until the current write is finished."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _store(self, step: int, packed: Packed, best: int | None, unfinished: UnfinishedCheckpoint | None) -> None:
        last = "none"
        try:
            if earlier := [c.step for c in list_checkpoints(self._folder) if c.step <= step]:
                last = f"step {earlier[-1]}"
            write_packed(self._folder, step, packed, unfinished)
        except Exception as error:  # training continues without this checkpoint
            self._failures.append(f"{describe_failed_write(step, error)} Last good checkpoint: {last}.")
            return
        try:
            self._remove_old(step, best)
        except OSError as error:
            self._failures.append(f"Checkpoints that are no longer needed could not be removed ({error}).")

    def _remove_old(self, step: int, best: int | None) -> None:
        checkpoints, own = list_checkpoints(self._folder), OwnFiles(self._folder)
        needed = [c for c in checkpoints if c.step <= step][-self._keep :] + [c for c in checkpoints if c.step == best]
        for checkpoint in checkpoints:
            if checkpoint in needed:
                continue
            path = checkpoint.path
            if (stranger := own.remove(folder_name(checkpoint.step), path.name)) is not None:
                aside = set_aside(path)  # or `resume=auto` could find it
                self._failures.append(f"{stranger} was not written by this run, so {path} was moved to {aside}.")


def describe_failed_write(step: int, why: Exception) -> str:
    """Return the message for a checkpoint that was not written."""
    return f"Checkpoint at step {step} failed ({why})."
