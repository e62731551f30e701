"""A run whose worker died goes on from its last checkpoint, in the same process, as `resume=auto` would."""

from __future__ import annotations

import copy
import warnings

from realign.runtime.backend import Backend, WorkerLost
from realign.runtime.checkpoints import list_checkpoints
from realign.runtime.experiment import AUTO, CHECKPOINTS, Experiment


class Attempts:
    """The attempts of one run.

    Attributes:
        experiment: of the present one. The first one's is that of the caller; each later one is a fresh copy, since
            interfaces keep state.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self._recoverable = experiment.runtime.kind is Backend.ray and experiment.checkpoint is not None
        self._fresh = copy.deepcopy(experiment) if self._recoverable else experiment
        self._recoveries = 0
        self._began = False

    def began(self) -> None:
        """What is in the folder of the run is from now on its own."""
        self._began = True

    def recover(self, lost: WorkerLost) -> None:
        """Make ready for the next attempt.

        Raises:
            WorkerLost: there is none, because checkpoint=null, or because there were `runtime.max_recoveries`.
        """
        most = self.experiment.runtime.max_recoveries
        if not self._recoverable:
            raise WorkerLost(f"{lost}; the run cannot go on from a checkpoint, since checkpoint=null") from lost
        if self._recoveries >= most:
            raise WorkerLost(
                f"{lost}; the run has gone on {most} times (runtime.max_recoveries); go on with resume=auto"
            ) from lost
        self._recoveries += 1
        self.experiment = again = copy.deepcopy(self._fresh)
        where = "starts again"
        if self._began and (found := list_checkpoints(again.output_dir / CHECKPOINTS)):
            again.resume, again.resume_allow, again.resume_skip = AUTO, [], []
            where = f"goes on after step {found[-1].step}"
        warnings.warn(f"{lost}; the run {where} (recovery {self._recoveries} of at most {most})", stacklevel=3)
