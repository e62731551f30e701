"""Recovery from a lost worker: resume from the last checkpoint in the same process, as `resume=auto` does."""

from __future__ import annotations

import copy
import warnings

from realign.runtime.checkpoint.folder import CHECKPOINTS, Checkpoint, list_checkpoints
from realign.runtime.experiment import AUTO, Experiment
from realign.runtime.processes.worker_failures import WorkerLost
from realign.runtime.runtime_spec import Ray


class Attempts:
    """The attempts of one run.

    Attributes:
        experiment: Experiment of the current attempt. The first attempt uses the caller's experiment. Each later
            attempt uses a fresh copy, because interfaces are stateful.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self._recoverable = experiment.runtime.starts_workers and experiment.checkpoint is not None
        self._fresh = copy.deepcopy(experiment) if self._recoverable else experiment
        self._recoveries = 0
        self._earlier: set[object] | None = None

    def began(self) -> None:
        """Mark the existing checkpoints as those of an earlier run; call this when the run has its folder."""
        if self._earlier is None:
            self._earlier = {_identity(checkpoint) for checkpoint in self._checkpoints()}

    def recover(self, lost: WorkerLost) -> None:
        """Prepare the next attempt.

        Raises:
            WorkerLost: No attempt is left, because checkpoint=null or `runtime.max_recoveries` is reached.
        """
        runtime = self.experiment.runtime
        most = runtime.max_recoveries if isinstance(runtime, Ray) else 0
        if not self._recoverable:
            raise WorkerLost(f"{lost}. The run has no checkpoint to continue from, since checkpoint=null.") from lost
        if self._recoveries >= most:
            raise WorkerLost(
                f"{lost}. The run has recovered runtime.max_recoveries={most} times. Restart it with resume=auto."
            ) from lost
        self._recoveries += 1
        self.experiment = again = copy.deepcopy(self._fresh)
        where = "restarts"
        found = self._checkpoints()
        # before it writes its first checkpoint, the run restarts as it did originally, with its own resume settings
        if self._earlier is not None and (own := [c for c in found if _identity(c) not in self._earlier]):
            # AUTO skips a damaged checkpoint, but would choose one of a later step that is about to be removed
            again.resume = AUTO if found[-1] is own[-1] else str(own[-1].path)
            again.resume_allow, again.resume_skip = [], []
            where = f"continues after step {own[-1].step}"
        warnings.warn(f"{lost}. The run {where} (recovery {self._recoveries} of at most {most}).", stacklevel=3)

    def _checkpoints(self) -> list[Checkpoint]:
        return list_checkpoints(self.experiment.output_dir / CHECKPOINTS)


def _identity(checkpoint: Checkpoint) -> object:
    """Return a key that differs between two checkpoints written to the same path one after the other."""
    found = checkpoint.path.stat()
    return checkpoint.path.name, found.st_ino, found.st_mtime_ns
