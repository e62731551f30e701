"""The output folder of a run: protect files of an earlier run or remove them, and lock out a second run."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from realign.engines.files.folders import check_run_folder
from realign.errors import ConfigError, TransientError
from realign.runtime.checkpoint.folder import CHECKPOINTS
from realign.runtime.checkpoint.schema import RECORDS
from realign.runtime.experiment import AUTO, CheckpointPart, Experiment
from realign.runtime.recorded_calls import CALLS

START = "start"
"""Folder below `output_dir` with the models and tokenizers that `realign.train` got as objects."""


def check_output_folder(experiment: Experiment) -> None:
    """Check that `output_dir` contains no run that must not be overwritten.

    Raises:
        ConfigError: it contains such a run. A link in the folder raises the error of `check_run_folder`.
    """
    out, resume = experiment.output_dir, experiment.resume
    check_run_folder(out)
    record = out / "metrics.jsonl"
    started = record.exists() and record.stat().st_size > 0  # a run with an empty record failed before its first line
    if experiment.overwrite or not started:
        return
    problem = f"output_dir={str(out)!r}: the folder contains an earlier run"
    # the leading `*` also finds `.step_000010.replaced`, the only checkpoint of a run that died while it replaced it
    resumable = any((out / CHECKPOINTS).glob("*step_*"))
    if resume is None:
        continue_it = "Continue that run with resume=auto, choose" if resumable else "Choose"
        raise ConfigError(f"{problem}. {continue_it} another folder, or set overwrite=true.")
    if resume == AUTO and not resumable and any(map(_has_model, _model_folders(out))):
        raise ConfigError(
            f"{problem} without a checkpoint, and resume=auto would replace its models. Choose another folder, or set "
            "overwrite=true."
        )
    if resume != AUTO and (CheckpointPart.counters in experiment.resume_skip or not experiment.owns(Path(resume))):
        raise ConfigError(f"{problem}, and resume={resume!r} starts a new one. Choose another folder.")


def clear_output_folder(out: Path, used: Collection[str] = ()) -> None:
    """Remove the files of an earlier run from an output folder, so that they do not mix with those of a new run.

    Args:
        out: the folder.
        used: folders of models and tokenizers that the new run reads, which remain.
    """
    records = [f"{name}.jsonl" for name in RECORDS]
    for name in (*records, "curves.png", "last_failure.json", "summary.json", "run.json", "report.html"):
        (out / name).unlink(missing_ok=True)
    read = {Path(path).absolute() for path in used}
    starts = [folder for folder in (out / START).glob("[0-9a-f]" * 16) if folder.absolute() not in read]
    for folder in (*_model_folders(out), out / "tensorboard", out / CHECKPOINTS, out / CALLS, *starts):
        if folder.is_dir():
            shutil.rmtree(folder)


def _model_folders(out: Path) -> list[Path]:
    """Return the folders with saved models."""
    return [folder for folder in (out / "final", out / "best", *out.glob("step_*")) if folder.is_dir()]


def _has_model(folder: Path) -> bool:
    """Return whether a folder with saved models is not empty, as after a save that failed."""
    return any(path.is_file() for path in folder.glob("*/*"))


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder until the context ends or the process exits, for any reason.

    Where folder locks are not supported (Windows, some network file systems), this does nothing.

    Raises:
        TransientError: Another run has locked the folder.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    # the kernel releases a lock on an open folder when the process dies, so a killed run leaves no stale lock file
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # any other error means that the file system has no locks; the run then goes on without one
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(number)
            raise TransientError(
                f"output_dir={folder}: another run is active in this folder. Wait until it ends, or use another folder."
            ) from error
    try:
        yield
    finally:
        os.close(number)
