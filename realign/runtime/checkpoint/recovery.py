"""A run whose worker died goes on from its last checkpoint, in the same process, as `resume=auto` would."""

from __future__ import annotations

import copy
import warnings

from realign.runtime.checkpoint.folder import Checkpoint, list_checkpoints
from realign.runtime.experiment import AUTO, CHECKPOINTS, Experiment
from realign.runtime.processes.worker_failures import WorkerLost
from realign.runtime.runtime_spec import Ray


class Attempts:
    """The attempts of one run.

    Attributes:
        experiment: of the present one. The first one's is that of the caller; each later one is a fresh copy, since
            interfaces keep state.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self._recoverable = experiment.runtime.starts_workers and experiment.checkpoint is not None
        self._fresh = copy.deepcopy(experiment) if self._recoverable else experiment
        self._recoveries = 0
        self._earlier: set[object] | None = None

    def began(self) -> None:
        """The run has its folder: the checkpoints that are there now are an earlier run's, later ones its own."""
        if self._earlier is None:
            self._earlier = {_identity(checkpoint) for checkpoint in self._checkpoints()}

    def recover(self, lost: WorkerLost) -> None:
        """Make ready for the next attempt.

        Raises:
            WorkerLost: there is none, because checkpoint=null, or because there were `runtime.max_recoveries`.
        """
        runtime = self.experiment.runtime
        most = runtime.max_recoveries if isinstance(runtime, Ray) else 0
        if not self._recoverable:
            raise WorkerLost(f"{lost}; the run cannot go on from a checkpoint, since checkpoint=null") from lost
        if self._recoveries >= most:
            raise WorkerLost(
                f"{lost}; the run has gone on {most} times (runtime.max_recoveries); go on with resume=auto"
            ) from lost
        self._recoveries += 1
        self.experiment = again = copy.deepcopy(self._fresh)
        where = "starts again"
        found = self._checkpoints()
        # until it has written one it begins as it did the first time, with what is said of resuming
        if self._earlier is not None and (own := [c for c in found if _identity(c) not in self._earlier]):
            # AUTO passes over one that is damaged; it would take one of a later step that is about to be removed
            again.resume = AUTO if found[-1] is own[-1] else str(own[-1].path)
            again.resume_allow, again.resume_skip = [], []
            where = f"goes on after step {own[-1].step}"
        warnings.warn(f"{lost}; the run {where} (recovery {self._recoveries} of at most {most})", stacklevel=3)

    def _checkpoints(self) -> list[Checkpoint]:
        return list_checkpoints(self.experiment.output_dir / CHECKPOINTS)


def _identity(checkpoint: Checkpoint) -> object:
    """Not the same for two that were written one after the other at one path."""
    found = checkpoint.path.stat()
    return checkpoint.path.name, found.st_ino, found.st_mtime_ns
