"""The saved models of a run: when they are saved, which folders are kept, and hashes of those in `final`."""

from __future__ import annotations

import difflib
import json
import math
import re
import stat
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realign.errors import CheckpointError, ConfigError, TransientError
from realign.models.files.folders import save_folder
from realign.own_files import OwnFiles, refuse_link, replace_text
from realign.ranks import Ranks
from realign.records.checkpoint.folder import facts_of

FINAL = "final"
"""Name of the folder with the models of the last step."""
SAVED = re.compile(r"step_[0-9]{6,}")
"""Names of the folders of models that a run writes every `every_steps` steps."""


def hashes_of(folder: Path) -> dict[str, Any]:
    """Return size and sha256 of every file below a folder, by relative path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): facts_of(path) for path in files}


def damage_of(folder: Path, files: Mapping[str, Any] | None) -> str | None:
    """Return what is wrong with the files in a folder, or None.

    Args:
        folder: Folder that `hashes_of` was called with.
        files: Result of `hashes_of`; None if the run stopped before it had saved them all.
    """
    if not folder.is_dir():
        return "the folder is missing"
    if files is None:
        return "they are not those of the last step"
    for name, facts in files.items():
        path = folder / name
        try:
            status = path.lstat()
        except OSError as error:
            return f"{name}: {error.strerror}"
        if not stat.S_ISREG(status.st_mode):
            return f"{name}: not a regular file"
        if status.st_size != facts["bytes"]:
            return f"{name}: {status.st_size} bytes, expected {facts['bytes']}"
        if facts_of(path) != facts:
            return f"{name}: sha256 mismatch"
    return None


@dataclass
class Saves:
    """The saved models of a run: folders `step_000050`, ..., `best` and `final`.

    Attributes:
        folder: Folder that contains the saved folders.
        write: Saves the models into the folder that is passed to it.
        every_steps: Steps between saves. None disables them.
        keep: Number of latest saves to keep. None keeps all.
        best: Metric whose maximum selects `best`; with a leading `-`, its minimum. None disables `best`.
        ranks: Processes of the run. All of them call `write` together, and rank 0 creates the folders.
    """

    folder: Path
    write: Callable[[Path], None]
    every_steps: int | None = None
    keep: int | None = None
    best: str | None = None
    ranks: Ranks = field(default_factory=Ranks)
    best_step: int | None = field(default=None, init=False)
    """Step of `best`; None before the first one is saved."""
    _made: list[Path] = field(default_factory=list, init=False)
    _known: set[str] = field(default_factory=set, init=False)
    _record: float = field(default=-math.inf, init=False)

    def after_step(self, step: int, metrics: Mapping[str, float], *, last: bool) -> None:
        """Save the models if a save is due after a step (0: before training).

        The run itself saves the models of the last step.

        Raises:
            ConfigError: The metric of `best` was measured neither before training nor in the first step.
        """
        self._keep_best(step, metrics)
        if not self.every_steps or step == 0 or step % self.every_steps or last:
            return
        if not self._save(name := f"step_{step:06d}"):
            return
        self._made.append(self.folder / name)
        while self.keep is not None and len(self._made) > self.keep:
            self._remove(self._made.pop(0))

    def final(self) -> None:
        """Save the models of the last step.

        Raises:
            OSError: they cannot be written.
        """
        if (problem := self._write(FINAL)) is not None:
            raise problem

    def state_dict(self) -> dict[str, Any]:
        """Return the saved folders, the known metrics, and the best value with its metric."""
        folders = [path.name for path in self._made]
        best = {"best": self.best, "record": self._record, "best_step": self.best_step}
        return {"made": folders, "known": sorted(self._known), **best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; the best value only if its metric is the same.

        Raises:
            CheckpointError: A saved folder has a name that no run uses.
            RealignError: A saved folder is a link.
        """
        self._made = [self._own_folder(name) for name in state["made"]]
        self._known = set(state["known"])
        if state["best"] == self.best:
            self._record, self.best_step = state["record"], state["best_step"]

    def _own_folder(self, name: str) -> Path:
        """Return the folder that a checkpoint names, which `_remove` may delete later."""
        if not SAVED.fullmatch(name):
            raise CheckpointError(
                f"saves.made={name!r} in the checkpoint: expected names such as step_000050. "
                "The checkpoint was changed. Resume from another one."
            )
        refuse_link(self.folder / name)
        return self.folder / name

    def _remove(self, path: Path) -> None:
        """Remove a folder of models, if it exists and contains nothing else."""
        refuse_link(path)
        if (stranger := OwnFiles(self.folder).remove(path.name)) is not None:
            warnings.warn(f"{stranger} was not written by this run, so {path} was not removed.", stacklevel=3)

    def _save(self, name: str, record: Mapping[str, Any] | None = None) -> bool:
        """Write the models of all roles and `record` into a new folder.

        On failure, such as a full disk, warn, leave no partial folder and return False.
        """
        if (problem := self._write(name, record)) is not None:
            warnings.warn(f"{problem}. Training continues without this save.", stacklevel=3)
        return problem is None

    def _write(self, name: str, record: Mapping[str, Any] | None = None) -> OSError | TransientError | None:
        """Write the models of all roles and `record` into a new folder, and return the error if that failed."""
        path, entered = self.folder / name, False

        def fill(folder: Path) -> None:
            nonlocal entered
            folder.mkdir()
            # tells the other ranks to enter `write`, which is a collective; if the folder cannot be made, they get
            # False below
            entered = self.ranks.broadcast(True)
            self.write(folder)
            if record is not None:
                replace_text(folder / f"{name}.json", json.dumps(record) + "\n")

        problem: OSError | TransientError | None = None
        try:
            if self.ranks.leader:
                save_folder(path, fill, OwnFiles(self.folder))
            elif self.ranks.broadcast(False):
                self.write(path)
        except (OSError, TransientError) as error:
            problem = error
            if self.ranks.leader and not entered:
                self.ranks.broadcast(False)
        return self.ranks.broadcast(problem)

    def _keep_best(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.best is None:
            return
        metric = self.best.removeprefix("-")
        self._known |= metrics.keys()
        due = step == 1 or (step == 0 and metric.startswith("eval/"))  # step 0 is the evaluation before training
        if due and metric not in self._known:
            near = difflib.get_close_matches(metric, self._known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Valid: {', '.join(sorted(self._known))}."
            when = "in the first step" if step else "before training"
            raise ConfigError(f"save_best={self.best}: no metric {metric!r} was measured {when}. {hint}")
        value = metrics.get(metric, math.nan)
        height = -value if self.best.startswith("-") else value
        # `not >` instead of `<=`, so that NaN is never the best
        if step == 0 or not height > self._record:  # untrained models are not saved
            return
        # a save that failed is no record: the next step that beats the earlier one tries again
        if self._save("best", {"step": step, "metric": metric, "value": value}):
            self._record, self.best_step = height, step
