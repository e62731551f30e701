"""When checkpoints are due, and their writing in a background thread while training continues."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from realign.engines.distributed.ranks import Ranks
from realign.engines.distributed.sharding import write_parts
from realign.runtime.checkpoint.folder import (
    PARTS,
    UnfinishedCheckpoint,
    begin,
    facts_of,
    list_checkpoints,
    remove,
    remove_leftovers,
    write_packed,
)
from realign.runtime.checkpoint.serialize import Packed, Tree, pack


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
        self._ranks.lead(partial(remove_leftovers, folder))

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

    def _write_parts(self, step: int, parts: Mapping[str, Tensor]) -> UnfinishedCheckpoint:
        """Write the shards of all ranks into a temporary folder (collective)."""
        folder = self._ranks.lead(partial(begin, self._folder, step))

        def write() -> dict[str, Any]:
            return {f"{PARTS}/{path.name}": facts_of(path) for path in write_parts(folder / PARTS, parts)}

        try:
            written = self._ranks.gather(self._ranks.together(write))
            files = {name: facts for of_rank in written for name, facts in of_rank.items()}
            self._ranks.lead(partial(_check_shared, folder, files))
        except BaseException:
            if self._ranks.leader:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return UnfinishedCheckpoint(folder, files)

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

    def _store(self, step: int, packed: Packed, best: int | None, begun: UnfinishedCheckpoint | None) -> None:
        last = "none"
        try:
            if earlier := [c.step for c in list_checkpoints(self._folder) if c.step <= step]:
                last = f"step {earlier[-1]}"
            write_packed(self._folder, step, packed, begun)
        except Exception as error:  # training continues without this checkpoint
            self._failures.append(f"{failed_write(step, error)} Last good checkpoint: {last}.")
            return
        try:
            self._remove_old(step, best)
        except OSError as error:
            self._failures.append(f"Checkpoints that are no longer needed could not be removed ({error}).")

    def _remove_old(self, step: int, best: int | None) -> None:
        checkpoints = list_checkpoints(self._folder)
        needed = [c for c in checkpoints if c.step <= step][-self._keep :] + [c for c in checkpoints if c.step == best]
        for checkpoint in checkpoints:
            if checkpoint not in needed:
                remove(checkpoint)


def _check_shared(folder: Path, files: Mapping[str, Any]) -> None:
    for name in files:
        if not (folder / name).is_file():
            raise OSError(f"{name} of another rank is missing. Use an output_dir that all ranks share")


def failed_write(step: int, why: Exception) -> str:
    """Return the message for a checkpoint that was not written."""
    return f"Checkpoint at step {step} failed ({why})."
