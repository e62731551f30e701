"""When the trained models are written, and which of the folders stay: every n steps, the last few, and the best."""

from __future__ import annotations

import difflib
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Saves:
    """The folders `step_000050`, ... and `best` of a run; `write` fills the one it is given.

    Attributes:
        folder: where they are made.
        write: saves the models.
        every_steps: steps between saves; None makes none.
        keep: how many of them stay, the latest; None keeps all.
        best: metric whose largest value so far is kept as `best`, or with a `-` in front the smallest; None: none.
    """

    folder: Path
    write: Callable[[Path], None]
    every_steps: int | None = None
    keep: int | None = None
    best: str | None = None
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
        self._made.append(self.folder / f"step_{step:06d}")
        self.write(self._made[-1])
        while self.keep is not None and len(self._made) > self.keep:
            shutil.rmtree(self._made.pop(0))

    def _keep_best(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.best is None:
            return
        metric = self.best.removeprefix("-")
        self._known |= metrics.keys()
        if step == 1 and metric not in self._known:
            near = difflib.get_close_matches(metric, self._known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"save_best: no metric {metric!r} was measured in the first step{hint}")
        value = metrics.get(metric, math.nan)
        height = -value if self.best.startswith("-") else value
        if step == 0 or not height > self._record:  # untrained models are where they came from
            return
        self._record = height
        self.write(self.folder / "best")
        record = {"step": step, "metric": metric, "value": value}
        (self.folder / "best" / "best.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
