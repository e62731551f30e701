"""When the trained models are saved, and which saved folders are kept: the latest ones and the best one."""

from __future__ import annotations

import difflib
import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realign.engines.distributed.ranks import Ranks
from realign.engines.files.folders import refuse_link, remove_folder, save_folder
from realign.errors import CheckpointError, ConfigError, RunError, TransientError
from realign.runtime.checkpoint.schema import SAVED
from realign.settings import Count, Positive, Settings


@dataclass
class CheckpointSpec(Settings):
    """When a run writes a checkpoint, from which `resume` continues bit for bit.

    A checkpoint is also written at the end of the run, and when a signal stops the run.
    """

    every_steps: Count | None = None
    """Steps between two checkpoints; null disables this limit."""
    every_minutes: Positive | None = 10.0
    """Minutes of training between two checkpoints; null disables this limit. The first limit reached applies."""
    keep: Count = 2
    """Number of latest checkpoints to keep. With `save_best`, the checkpoint of the best step is kept too."""

    def due(self, step: int, seconds: float) -> bool:
        """Return whether a checkpoint is due after this step, `seconds` after the last checkpoint."""
        by_step = self.every_steps is not None and step % self.every_steps == 0
        return by_step or (self.every_minutes is not None and seconds >= 60 * self.every_minutes)

    def describe(self) -> str:
        """Return a human-readable summary."""
        steps = [] if self.every_steps is None else [f"every {self.every_steps} steps"]
        minutes = [] if self.every_minutes is None else [f"every {self.every_minutes:g} minutes"]
        return f"{', '.join([*steps, *minutes, 'at the end'])}; keeps the last {self.keep}"


@dataclass
class Saves:
    """The saved models of a run: folders `step_000050`, ... and `best`.

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
        if not self._written(name := f"step_{step:06d}"):
            return
        self._made.append(self.folder / name)
        while self.keep is not None and len(self._made) > self.keep:
            self._remove(self._made.pop(0))

    def state_dict(self) -> dict[str, Any]:
        """Return the saved folders, the known metrics, and the best value with its metric."""
        made = [path.name for path in self._made]
        best = {"best": self.best, "record": self._record, "best_step": self.best_step}
        return {"made": made, "known": sorted(self._known), **best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; the best value only if its metric is the same.

        Raises:
            CheckpointError: A saved folder has a name that no run uses.
            RealignError: A saved folder is a link.
        """
        made = state["made"]
        if not isinstance(made, list):
            raise CheckpointError(f"saves.made={made!r} in the checkpoint: expected a list of folder names.")
        self._made = [self._own_folder(name) for name in made]
        self._known = set(state["known"])
        if state["best"] == self.best:
            self._record, self.best_step = state["record"], state["best_step"]

    def _own_folder(self, name: Any) -> Path:
        """Return the folder that a checkpoint names, which `_remove` may delete later."""
        if not isinstance(name, str) or not SAVED.fullmatch(name):
            raise CheckpointError(
                f"saves.made={name!r} in the checkpoint: expected names such as step_000050. "
                "The checkpoint was changed. Resume from another one."
            )
        refuse_link(self.folder / name)
        return self.folder / name

    def _remove(self, path: Path) -> None:
        """Delete a folder of models, if it exists. Raise an error if it is not a direct child of the run's folder."""
        refuse_link(path)
        if not path.exists():
            return
        if not SAVED.fullmatch(path.name) or path.resolve().parent != self.folder.resolve():
            raise RunError(f"{str(path)!r} is not a folder of models in {str(self.folder)!r}. It was not removed.")
        remove_folder(path)

    def _written(self, name: str, record: Mapping[str, Any] | None = None) -> bool:
        """Write the models of all roles and `record` into a new folder.

        On failure, such as a full disk, warn, leave no partial folder and return False.
        """
        path, begun = self.folder / name, False

        def fill(folder: Path) -> None:
            nonlocal begun
            folder.mkdir()
            begun = self.ranks.broadcast(True)
            self.write(folder)
            if record is not None:
                (folder / f"{name}.json").write_text(json.dumps(record) + "\n", encoding="utf-8")

        problem = None
        try:
            if self.ranks.leader:
                save_folder(path, fill)
            elif self.ranks.broadcast(False):
                self.write(path)
        except (OSError, TransientError) as error:
            problem = str(error)
            if self.ranks.leader and not begun:
                self.ranks.broadcast(False)
        problem = self.ranks.broadcast(problem)
        if problem is not None:
            warnings.warn(f"{problem}. Training continues without this save.", stacklevel=3)
        return problem is None

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
        if step == 0 or not height > self._record:  # untrained models are not saved
            return
        if self._written("best", {"step": step, "metric": metric, "value": value}):
            self._record, self.best_step = height, step
