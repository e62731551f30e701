"""When the trained models are written, and which of the folders stay: every n steps, the last few, and the best."""

from __future__ import annotations

import difflib
import json
import math
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realign.engines.distributed.ranks import Ranks
from realign.engines.files.folders import refuse_link, save_folder
from realign.settings import Count, Positive, Settings


@dataclass
class CheckpointSpec(Settings):
    """When a run writes all that it needs to go on bit for bit (`resume`).

    One is written at the end and when a signal stops the run in any case.
    """

    every_steps: Count | None = None
    """Steps between two."""
    every_minutes: Positive | None = 10.0
    """Minutes of training between two; whichever of the two limits comes first."""
    keep: Count = 2
    """How many stay, the latest ones; with `save_best` that of the best step is written and stays, too."""

    def due(self, step: int, seconds: float) -> bool:
        """Whether one is written after this step, `seconds` after the last one."""
        by_step = self.every_steps is not None and step % self.every_steps == 0
        return by_step or (self.every_minutes is not None and seconds >= 60 * self.every_minutes)

    def describe(self) -> str:
        """For people."""
        steps = [] if self.every_steps is None else [f"every {self.every_steps} steps"]
        minutes = [] if self.every_minutes is None else [f"every {self.every_minutes:g} minutes"]
        return f"{', '.join([*steps, *minutes, 'at the end'])}; the last {self.keep} stay"


_SAVED = re.compile(r"step_[0-9]{6,}")
"""Names of the folders of models that a run makes every `every_steps` steps."""


@dataclass
class Saves:
    """The folders `step_000050`, ... and `best` of a run; `write` fills the one it is given.

    Attributes:
        folder: where they are made.
        write: saves the models.
        every_steps: steps between saves; None makes none.
        keep: how many of them stay, the latest; None keeps all.
        best: metric whose largest value so far is kept as `best`, or with a `-` in front the smallest; None: none.
        ranks: the processes of the run, which all call `write` together; rank 0 makes the folders.
    """

    folder: Path
    write: Callable[[Path], None]
    every_steps: int | None = None
    keep: int | None = None
    best: str | None = None
    ranks: Ranks = field(default_factory=Ranks)
    best_step: int | None = field(default=None, init=False)
    """The step of `best`, once there is one."""
    _made: list[Path] = field(default_factory=list, init=False)
    _known: set[str] = field(default_factory=set, init=False)
    _record: float = field(default=-math.inf, init=False)

    def after_step(self, step: int, metrics: Mapping[str, float], *, last: bool) -> None:
        """Save what is due after a step (0: before training); the models of the last step are written by the run.

        Raises:
            ValueError: the metric of `best` was not measured, neither before training nor in the first step.
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
        """The folders that were made, the metrics that are known, and the best value with the metric it is of."""
        made = [path.name for path in self._made]
        best = {"best": self.best, "record": self._record, "best_step": self.best_step}
        return {"made": made, "known": sorted(self._known), **best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the best value only if it is of the same metric.

        Raises:
            ValueError: a saved folder is not the name of a folder that a run makes, or is a link.
        """
        made = state["made"]
        if not isinstance(made, list):
            raise ValueError(f"saves.made={made!r} in the checkpoint: expected a list of folder names.")
        self._made = [self._own_folder(name) for name in made]
        self._known = set(state["known"])
        if state["best"] == self.best:
            self._record, self.best_step = state["record"], state["best_step"]

    def _own_folder(self, name: Any) -> Path:
        """Return the folder that a checkpoint names, which `_remove` may delete later."""
        if not isinstance(name, str) or not _SAVED.fullmatch(name):
            raise ValueError(
                f"saves.made={name!r} in the checkpoint: expected names such as step_000050. "
                "The checkpoint was changed; resume from another one."
            )
        refuse_link(self.folder / name)
        return self.folder / name

    def _remove(self, path: Path) -> None:
        """Delete a folder of models, if it is a direct child of the run's folder; a resumed run may have deleted it."""
        refuse_link(path)
        if not path.exists():
            return
        if not _SAVED.fullmatch(path.name) or path.resolve().parent != self.folder.resolve():
            raise ValueError(f"{str(path)!r} is not a folder of models in {str(self.folder)!r}. It was not removed.")
        shutil.rmtree(path)

    def _written(self, name: str, record: Mapping[str, Any] | None = None) -> bool:
        """Write the models of all roles, and `record` beside them, or nothing: a full disk costs this folder only."""
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
        except OSError as error:
            problem = str(error)
            if self.ranks.leader and not begun:
                self.ranks.broadcast(False)
        problem = self.ranks.broadcast(problem)
        if problem is not None:
            warnings.warn(f"{problem}; the run goes on", stacklevel=3)
        return problem is None

    def _keep_best(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.best is None:
            return
        metric = self.best.removeprefix("-")
        self._known |= metrics.keys()
        due = step == 1 or (step == 0 and metric.startswith("eval/"))  # an evaluation comes before training, too
        if due and metric not in self._known:
            near = difflib.get_close_matches(metric, self._known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(self._known))}"
            when = "in the first step" if step else "before training"
            raise ValueError(f"save_best: no metric {metric!r} was measured {when}{hint}")
        value = metrics.get(metric, math.nan)
        height = -value if self.best.startswith("-") else value
        if step == 0 or not height > self._record:  # untrained models are where they came from
            return
        if self._written("best", {"step": step, "metric": metric, "value": value}):
            self._record, self.best_step = height, step
