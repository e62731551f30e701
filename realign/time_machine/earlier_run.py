"""The earlier run that a command names: its folder, a step of it, and its experiment."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from realign.cli.arguments import compose_line
from realign.cli.train import build
from realign.config.errors import ConfigError
from realign.records.record_files import json_object
from realign.report.files import check_run, flat_config

if TYPE_CHECKING:
    from realign.runtime import Experiment


def experiment_of(run: Path, *overrides: str) -> Experiment:
    """Build the experiment of a run from its resolved config."""
    return build(compose_line([str(run / "config.yaml"), *overrides], None).resolve())


def run_and_step(command: str, words: Sequence[str]) -> tuple[Path, int]:
    """Return the run and the step in the words of a command.

    Raises:
        ConfigError: they are something else, or the folder contains no run.
    """
    if len(words) != 2 or not words[1].isdecimal():
        shown = list(words) or "none"
        raise ConfigError(f"realign {command} expects a run and a step, such as runs/NAME 37, found {shown}")
    return run_folder(Path(words[0])), int(words[1])


def run_folder(run: Path) -> Path:
    """Return the absolute folder of a run, and change to the folder where the run was started.

    The paths in a config are relative to it. If it was moved, it follows from the folder of the run.

    Raises:
        ConfigError: the folder contains no run, or the run has no config because it was started in Python.
    """
    run = run.absolute()
    check_run(run)
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run}: the run has no config.yaml, since it was started in Python without a config.")
    folder = json_object(run / "run.json").get("folder")
    if isinstance(folder, str):
        out = Path(str(flat_config(run / "config.yaml").get("output_dir")))
        if Path(folder).is_dir():
            os.chdir(folder)
            if out.absolute().resolve() != run.resolve():
                warnings.warn(
                    f"{run} was moved or comes from somebody else. Paths in its config are read from {folder}, which "
                    "its run.json names.",
                    stacklevel=2,
                )
        elif run.parts[-len(out.parts) :] == out.parts:
            os.chdir(Path(*run.parts[: -len(out.parts)]))
        else:
            warnings.warn(
                f"{folder}, where the run was started, is gone. Paths in its config are relative to it. Start this "
                "command where they lead to its files.",
                stacklevel=2,
            )
    return run


def resolve_out(out: str | None) -> Path | None:
    """Return the absolute path of `--out`, before `run_folder` changes to another folder."""
    return Path(out).absolute() if out else None


def check_writable(folder: Path) -> None:
    """Check that a folder can be written to or created, before a step is recomputed for it.

    Raises:
        ConfigError: it cannot.
    """
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"--out {folder}: {nearest} is a file. Choose another folder.")
    if not os.access(nearest, os.W_OK):
        raise ConfigError(f"--out {folder}: {nearest} cannot be written to. Choose another folder.")
