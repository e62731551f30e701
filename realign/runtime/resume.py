"""Find the checkpoint that a run resumes from, check that it matches the config, and recover from lost workers."""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from realign.errors import CheckpointError, ConfigError, RunComplete
from realign.records.checkpoint.folder import CHECKPOINTS, Checkpoint, Start, list_checkpoints, newest
from realign.records.checkpoint.saved_models import FINAL, damage_of
from realign.records.checkpoint.schema import check_tree
from realign.run_settings import is_free
from realign.runtime.callbacks.run_callbacks import settings_of
from realign.runtime.experiment import AUTO, CheckpointPart, Experiment
from realign.runtime.processes.watchdog import WorkerLost
from realign.runtime.run_checkpoints import config_leaves, config_of, environment
from realign.runtime.runtime_spec import Ray

_ABSENT = "(none)"
DYNAMIC_SAMPLING = "dynamic_sampling"
"""Config key of the component that ends the run of a solved task."""


def find_start(experiment: Experiment) -> Start | None:
    """Read the checkpoint that `experiment.resume` selects and compare it with the config.

    If the run is complete, but the models in `final` are damaged or missing, the result is the checkpoint of the last
    step, from which the run saves them again.

    Returns:
        The checkpoint; None if `resume` is None, or if `resume=auto` finds no checkpoint.

    Raises:
        CheckpointError: The path has no readable checkpoint, or the config differs.
        RunComplete: No step is left.
        ConfigError: A key of `resume_allow` does not exist.
    """
    if experiment.resume is None:
        return None
    selected = _find(experiment)
    if selected is None:
        return None
    checkpoint, state = selected
    check_tree(str(checkpoint.path), state)
    new_run = CheckpointPart.counters in experiment.resume_skip
    own = experiment.owns(checkpoint.path)
    complete = not new_run and (checkpoint.step >= experiment.steps or _find_stop(experiment, state) is not None)
    if complete:
        _check_complete(experiment, checkpoint, state, own)
    check_config(state["config"], config_of(experiment), experiment.resume_allow)
    warn_of_another_environment(state["environment"])
    return Start(checkpoint, state, own, new_run, complete)


def _find_stop(experiment: Experiment, state: Mapping[str, Any]) -> Mapping[str, str] | None:
    """Return the stop that ended the run; None if nothing did, or if what stopped it is changed or removed."""
    stop = state["callbacks"]["stop"]
    if stop is None or CheckpointPart.callbacks in experiment.resume_skip:
        return None
    may_stop: dict[str, object] = {f"callbacks.{name}": callback for name, callback in experiment.callbacks.items()}
    component = (may_stop | {DYNAMIC_SAMPLING: experiment.dynamic_sampling}).get(stop["key"])
    return stop if component is not None and settings_of(component) == stop["settings"] else None


def _check_complete(experiment: Experiment, checkpoint: Checkpoint, state: Mapping[str, Any], own: bool) -> None:
    """Raise RunComplete if no step is left. Warn instead if the models of the run must be saved again."""
    done = (
        f"steps={experiment.steps}: the run is complete, since {checkpoint.path} is at step {checkpoint.step}. "
        "Increase steps to continue."
    )
    if checkpoint.step < experiment.steps and (stop := _find_stop(experiment, state)) is not None:
        key = stop["key"]
        done = (
            f"{key} stopped the run at step {checkpoint.step} of {experiment.steps}: {stop['reason']}. To continue, "
            f"change its settings, or remove it with {key}=null."
        )
    folder = experiment.output_dir / FINAL
    damage = damage_of(folder, state["saves"].get("final")) if own else None
    if damage is None:
        raise RunComplete(done)
    if checkpoint.step > experiment.steps:
        raise RunComplete(
            f"{done} The saved models in {folder} are damaged ({damage}). Set steps={checkpoint.step} to restore them."
        )
    warnings.warn(
        f"The run is complete, but its saved models in {folder} are damaged ({damage}). They are saved again from "
        f"{checkpoint.path}.",
        stacklevel=3,
    )


def _find(experiment: Experiment) -> tuple[Checkpoint, dict[str, Any]] | None:
    def warn(message: str) -> None:
        warnings.warn(message, stacklevel=2)

    assert experiment.resume is not None
    if experiment.resume == AUTO:
        return newest(experiment.output_dir / CHECKPOINTS, warn)
    path = experiment.resume_folder()
    assert path is not None
    # `path` may be a checkpoint itself; the list of its folder leaves out links and other names
    for checkpoint in list_checkpoints(path.parent):
        if checkpoint.path == path:
            return checkpoint, checkpoint.read()
    for folder in (path / CHECKPOINTS, path):
        if (checkpoint_and_tree := newest(folder, warn)) is not None:
            return checkpoint_and_tree
    raise CheckpointError(
        f"resume={experiment.resume}: no checkpoint found. Set a run folder or a checkpoint such as "
        "runs/NAME/checkpoints/step_000010."
    )


def check_config(saved: Mapping[str, Any], present: Mapping[str, Any], allow: Iterable[str]) -> None:
    """Check that the config matches the config of the checkpoint.

    Args:
        saved: Config that the checkpoint was written with.
        present: Config of the resumed run.
        allow: Keys that may differ. A key includes all keys below it.

    Raises:
        CheckpointError: Keys differ. The message lists them with both values.
        ConfigError: A key of `allow` does not exist.
    """
    before, now = dict(config_leaves(saved)), dict(config_leaves(present))
    known = {key[:end] for key in before | now for end in _ends(key)}
    for key in allow:
        if key not in known:
            near = get_close_matches(key, sorted(known), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"resume_allow={key}: the config has no such key.{hint}")
    stretched = _stretched_schedules(before, now)
    meant = {*allow, *stretched}
    differing = [
        f"{key} was {before.get(key, _ABSENT)}, is {now.get(key, _ABSENT)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not is_free(key) and not any(key[:end] in meant for end in _ends(key))
    ]
    if not differing and stretched:
        totals = "; ".join(f"{key} was {before[key]}, is {now[key]}" for key in stretched)
        warnings.warn(
            f"Learning-rate schedules follow steps ({totals}). The run continues with the rates of the new schedule. "
            f"To keep the earlier schedule, set {stretched[0]}={before[stretched[0]]}.",
            stacklevel=3,
        )
    if differing:
        raise CheckpointError(
            f"The config differs from that of the checkpoint: {'; '.join(differing)}. To resume with the new values, "
            f"list the keys in resume_allow, such as 'resume_allow=[{differing[0].split()[0]}]'."
        )


def training_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a config that affect training, as JSON by key."""
    return {key: value for key, value in config_leaves(config) if not is_free(key)}


def settings_hash(config: Mapping[str, Any]) -> str:
    """Return a hash of the settings of a config that affect training."""
    return hashlib.sha256(json.dumps(training_settings(config), sort_keys=True).encode()).hexdigest()[:16]


def _stretched_schedules(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the schedule lengths that equal `steps` in both configs, as `total: ${steps}` does, and differ."""
    return [
        key
        for key in sorted(before.keys() & now.keys())
        if key.endswith(".schedule.total") and before[key] != now[key]
        if (before[key], now[key]) == (before.get("steps"), now.get("steps"))
    ]


def _ends(key: str) -> list[int]:
    """Return the end index of each component of a dotted key."""
    return [i for i, char in enumerate(key) if char == "."] + [len(key)]


def warn_of_another_environment(saved: Mapping[str, Any]) -> None:
    """Warn if software or hardware differs from the checkpoint: the resumed run is then not bit-exact."""
    now = environment()
    if differing := [f"{k} was {saved.get(k, _ABSENT)}, is {now[k]}" for k in now if saved.get(k) != now[k]]:
        warnings.warn(
            f"The environment differs from that of the checkpoint ({'; '.join(differing)}). The run continues. Its "
            "metrics and weights can differ slightly from those of an uninterrupted run.",
            stacklevel=2,
        )


class Attempts:
    """The attempts of one run.

    Attributes:
        experiment: Experiment of the current attempt. The first attempt uses the caller's experiment. Each later
            attempt uses a fresh copy, because interfaces are stateful.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self._recoverable = experiment.runtime.starts_workers and experiment.checkpoint is not None
        # taken now, because loading and training change the interfaces
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
        checkpoints = self._checkpoints()
        # before it writes its first checkpoint, the run restarts as it did originally, with its own resume settings
        if self._earlier is not None and (own := [c for c in checkpoints if _identity(c) not in self._earlier]):
            # AUTO skips a damaged checkpoint, but would choose one of a later step that is about to be removed
            again.resume = AUTO if checkpoints[-1] is own[-1] else str(own[-1].path)
            # they are about the checkpoint of another run; the run's own matches its config and misses nothing
            again.resume_allow, again.resume_skip = [], []
            where = f"continues after step {own[-1].step}"
        warnings.warn(f"{lost}. The run {where} (recovery {self._recoveries} of at most {most}).", stacklevel=3)

    def _checkpoints(self) -> list[Checkpoint]:
        return list_checkpoints(self.experiment.output_dir / CHECKPOINTS)


def _identity(checkpoint: Checkpoint) -> object:
    """Return a key that differs between two checkpoints written to the same path one after the other."""
    status = checkpoint.path.stat()
    return checkpoint.path.name, status.st_ino, status.st_mtime_ns
