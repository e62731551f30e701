"""Shared code of the demos: command line, output folder, start and end of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import transformers
from rich.console import Console

from realign.errors import ConfigError, ExitCode, RealignError, TransientError
from realign.own_files import FILES, OwnFiles, make_folder, replace_text
from realign.runtime.output_folder import check_strangers, remove_output_folder

Results = TypeVar("Results")
RESULTS = "results.json"
"""Name of the file with the results."""


@dataclass(frozen=True)
class Demo:
    """Settings from the command line."""

    seed: int
    shuffle: bool
    output_dir: Path
    overrides: Mapping[str, Sequence[str]]
    """Overrides by run. The last run has the key ""; the others, given as `RUN.KEY=VALUE`, have their name as key."""

    @classmethod
    def parse(cls, arguments: Sequence[str], *, name: str, runs: Sequence[str]) -> Demo:
        """Parse `key=value` arguments into the settings of the demo and the overrides of its runs.

        Args:
            arguments: Arguments of the command line.
            name: Name of the demo, which is part of the default `output_dir`.
            runs: Names of the runs before the last one.

        Raises:
            ConfigError: a setting of the demo has an invalid value.
        """
        own = {"seed": "0", "shuffle": "false", "output_dir": ""}
        overrides: dict[str, list[str]] = {run: [] for run in ("", *runs)}
        for argument in arguments:
            key, _, value = argument.partition("=")
            run, dot, rest = argument.partition(".")
            if key in own:
                own[key] = value
            elif dot and run in runs:
                overrides[run].append(rest)
            else:
                overrides[""].append(argument)
        if not own["seed"].isdigit():
            raise ConfigError(f"seed={own['seed']}: must be a whole number.")
        if own["shuffle"] not in ("true", "false"):
            raise ConfigError(f"shuffle={own['shuffle']}: must be true or false.")
        shuffle = own["shuffle"] == "true"
        folder = own["output_dir"] or f"runs/{name}-seed{own['seed']}" + ("-shuffled" if shuffle else "")
        return cls(int(own["seed"]), shuffle, Path(folder), overrides)


def launch(
    arguments: Sequence[str],
    *,
    name: str,
    subject: str,
    runs: Sequence[str],
    train: Callable[[Demo, Console], Results],
    show: Callable[[Demo, Console, Results], Mapping[str, Any]],
    usage: str,
) -> int:
    """Run a demo, and write its results to `results.json`. `--help` prints `usage` instead.

    A program that reads the output gets the results as its last line, too: one JSON object.

    Args:
        arguments: Arguments of the command line.
        name: Name of the demo.
        subject: Topic of the demo, in a few words.
        runs: Names of the runs before the last one.
        train: Executes the runs. A RealignError is printed in one line.
        show: Prints the results and returns them as a JSON object.
        usage: Text of `--help`.

    Returns:
        The exit code.
    """
    if {"--help", "-h"} & set(arguments):
        print(usage.strip())
        return 0
    transformers.utils.logging.disable_progress_bar()  # progress bars only flicker for a tiny model
    transformers.utils.logging.set_verbosity_error()  # hides its long warning about a new head
    console = Console()
    try:
        demo = Demo.parse(arguments, name=name, runs=runs)
        console.print(f"[bold]realign {name}[/]: {subject}, seed {demo.seed}, output folder {demo.output_dir}")
        results = train(demo, console)
    except RealignError as error:
        print(f"realign: {error}", file=sys.stderr)
        return ExitCode.transient if isinstance(error, TransientError) else ExitCode.error
    except KeyboardInterrupt:
        print("realign: interrupted", file=sys.stderr)
        return ExitCode.interrupted
    line = json.dumps(show(demo, console, results))
    OwnFiles(demo.output_dir).claim(RESULTS)
    replace_text(demo.output_dir / RESULTS, f"{line}\n")
    console.print(f"results: {demo.output_dir / RESULTS}", highlight=False)
    if not sys.stdout.isatty():
        print(line, flush=True)
    return 0


def remove_earlier(folder: Path, left: Set[str]) -> None:
    """Remove the files of an earlier demo from `folder`, if it contains no other files.

    Args:
        folder: Output folder of the demo.
        left: Names of all files and folders that the demo creates in it.

    Raises:
        ConfigError: the folder contains a file or folder that the demo did not create.
    """
    present = list(folder.iterdir()) if folder.is_dir() else []
    if foreign := sorted({path.name for path in present} - left - {RESULTS, FILES}):
        raise ConfigError(
            f"output_dir={folder}: the folder contains {foreign[0]!r}, which is not of the demo. Choose another."
        )
    own, names = OwnFiles(folder), (*left, RESULTS)
    runs = [path.name for path in present if (path / FILES).is_file()]
    for run in runs:
        check_strangers(folder / run)
    own.check(*(name for name in names if name not in runs))
    for name in names:
        remove_output_folder(folder / name) if name in runs else own.remove(name)
    make_folder(folder)
    own.restart(*(name for name in names if Path(name).suffix))


def keep_record(folder: Path, *names: str) -> None:
    """Record that the demo wrote these files and folders in its output folder, for `remove_earlier`."""
    for name in names:
        OwnFiles(folder).record(name, folder / name)


def median(values: Sequence[float]) -> float:
    """Return the upper median; 0 if there are no values."""
    return sorted(values)[len(values) // 2] if values else 0.0
