"""The output folder of a run: protect files of an earlier run or remove them, and lock out a second run."""

from __future__ import annotations

import dataclasses
import errno
import glob
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from realign.errors import ConfigError, TransientError
from realign.models.files.folders import check_run_folder
from realign.own_files import FILES, OwnFiles, remove_empty, remove_scratch
from realign.records.checkpoint.folder import CHECKPOINTS, REPLACED
from realign.records.checkpoint.saved_models import FINAL, SAVED
from realign.records.checkpoint.schema import RECORDS
from realign.records.recorded_calls import CALLS
from realign.run_settings import RunSettings
from realign.runtime.experiment import AUTO, CheckpointPart, Experiment
from realign.runtime.reference_cache import REFERENCES

START = "start"
"""Folder below `output_dir` with the models and tokenizers that `realign.train` got as objects."""


CLAIMED = (
    *(f"{name}.jsonl" for name in RECORDS),
    *("config.yaml", "curves.png", "last_failure.json", "summary.json", "run.json", "realign.log"),
    *(REFERENCES, CALLS, "tensorboard"),
)
"""Files that a run writes again and again, and folders to which it adds files."""
HYDRA = (".hydra/config.yaml", ".hydra/overrides.yaml")
"""Files that the command of a run writes before the run starts."""
REPORT = "report.html"
_NOT_READ = ("output_dir", "name", "resume", "trackers")


def check_output_folder(experiment: Experiment) -> None:
    """Check that a run neither overwrites another one in `output_dir`, nor files of somebody else, nor what it reads.

    Raises:
        ConfigError: it would. A link in the folder raises the error of `check_run_folder`.
    """
    out, resume = experiment.output_dir, experiment.resume
    check_run_folder(out)
    for key, text, path in _read_paths(experiment):
        below = path.relative_to(out.resolve()).parts if path.is_relative_to(out.resolve()) else ()
        if below and (below[0] in (*CLAIMED, FINAL, "best", CHECKPOINTS) or SAVED.fullmatch(below[0])):
            raise ConfigError(
                f"{key}={text!r}: the run reads this, and writes {below[0]!r} in output_dir={str(out)!r}. Choose "
                "another output_dir."
            )
    # the leading `*` also finds `.step_000010.replaced`, the only checkpoint of a run that died while it replaced it
    resumable = any((out / CHECKPOINTS).glob("*step_*"))
    own = resume not in (None, AUTO) and experiment.owns(Path(str(resume)))
    if not (resume == AUTO and resumable) and not own:
        check_strangers(out)
    record = out / "metrics.jsonl"
    started = record.exists() and record.stat().st_size > 0  # a run with an empty record failed before its first line
    if experiment.overwrite or not started:
        return
    problem = f"output_dir={str(out)!r}: the folder contains an earlier run"
    if resume is None:
        continue_it = "Continue that run with resume=auto, choose" if resumable else "Choose"
        raise ConfigError(f"{problem}. {continue_it} another folder, or set overwrite=true.")
    if resume == AUTO and not resumable and any(map(_has_model, _model_folders(out))):
        raise ConfigError(
            f"{problem} without a checkpoint, and resume=auto would replace its models. Choose another folder, or set "
            "overwrite=true."
        )
    if resume != AUTO and (CheckpointPart.counters in experiment.resume_skip or not own):
        raise ConfigError(f"{problem}, and resume={resume!r} starts a new one. Choose another folder.")


def check_strangers(out: Path) -> None:
    """Check that what an output folder has under the names of a run was written by one.

    Raises:
        ConfigError: there is a file that no run wrote, or that was changed since.
    """
    strangers = [stranger for own, name, at in _present(out) if (stranger := own.stranger(name, at)) is not None]
    if strangers:
        more = f" (and {len(strangers) - 1} more)" if strangers[1:] else ""
        raise ConfigError(
            f"output_dir={str(out)!r}: {str(strangers[0].relative_to(out))!r}{more} is where a run writes, but no run "
            "wrote it, or it was changed since. Choose another output_dir, or move it."
        )


def take_output_folder(experiment: Experiment, *, fresh: bool) -> None:
    """Prepare an output folder for a run: without the files of an earlier one, if it is `fresh`.

    Raises:
        ConfigError: see `check_strangers`.
    """
    out = experiment.output_dir
    if not fresh:
        OwnFiles(out).record_existing(*CLAIMED)
        return
    check_strangers(out)
    _clear(out, kept={path for _, _, path in _read_paths(experiment)})
    OwnFiles(out).restart(*CLAIMED, *(name for name in HYDRA if (out / name).exists()))


def remove_output_folder(out: Path) -> None:
    """Remove the files of a run from its folder, and the folder if nothing is left."""
    _clear(out, kept=())
    for name in HYDRA:
        OwnFiles(out).remove(name)
    OwnFiles(out).forget()
    remove_empty(out / ".hydra", out)


def _clear(out: Path, kept: Collection[Path]) -> None:
    for own in (OwnFiles(out), OwnFiles(out / CHECKPOINTS)):
        for folder in own.scratches():
            remove_scratch(folder)
    for own, name, at in _present(out):
        if name not in (FILES, *HYDRA):
            own.remove(name, at)
    starts = OwnFiles(out / START)
    for folder in starts.folder.glob("[0-9a-f]" * 16):
        if folder.resolve() not in kept:
            starts.remove(folder.name)
    OwnFiles(out / CHECKPOINTS).forget()
    remove_empty(out / CHECKPOINTS, out / CALLS, out / "tensorboard")


def _present(out: Path) -> Iterator[tuple[OwnFiles, str, str | None]]:
    """Yield what a folder has under the names of a run: who knows whether it is ours, its name, and the present one."""
    own, checkpoints = OwnFiles(out), OwnFiles(out / CHECKPOINTS)
    for name in (FILES, *CLAIMED, REPORT, *HYDRA, FINAL, "best"):
        if os.path.lexists(out / name):
            yield own, name, None
    for path in sorted(out.glob("step_*")):
        if SAVED.fullmatch(path.name):
            yield own, path.name, None
    if not checkpoints.folder.is_dir():
        yield own, CHECKPOINTS, None
        return
    unfinished = checkpoints.scratches()
    for path in sorted(checkpoints.folder.iterdir()):
        if path not in unfinished:
            name = path.name.removeprefix(".").removesuffix(f".{REPLACED}") if path.name.startswith(".") else path.name
            yield checkpoints, name, path.name


def _read_paths(experiment: Experiment) -> Iterator[tuple[str, str, Path]]:
    """Yield each path in the settings that exists: its key, its text, and the path without links."""
    for key, text in _texts({f.name: getattr(experiment, f.name) for f in dataclasses.fields(RunSettings)}, ""):
        if key.partition(".")[0] in _NOT_READ or not text or "\0" in text or len(text) > 4096:
            continue
        for named in {text, text.rpartition(":")[0]} - {""}:  # such as rewards.py:score
            place = os.path.expanduser(named)
            with suppress(OSError):
                pattern = key.endswith(".path") and glob.has_magic(place)
                found = glob.glob(place, recursive=True) if pattern else [place]
                yield from ((key, text, Path(path).resolve()) for path in found if os.path.exists(path))


def _texts(node: Any, key: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the key and text of each setting that may be a path."""
    if isinstance(node, str | Path):
        yield key, str(node)
    elif depth > 20:
        return
    elif isinstance(node, Mapping):
        for name, value in node.items():
            yield from _texts(value, f"{key}.{name}" if key else str(name), depth + 1)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _texts(value, key, depth + 1)
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        for field in dataclasses.fields(node):
            yield from _texts(getattr(node, field.name, None), f"{key}.{field.name}", depth + 1)


def _model_folders(out: Path) -> list[Path]:
    """Return the folders with saved models."""
    return [folder for folder in (out / FINAL, out / "best", *out.glob("step_*")) if folder.is_dir()]


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
