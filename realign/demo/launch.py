"""What the demos have in common: their command line, the folder that they may empty, how they begin and end."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import transformers
from rich.console import Console

from realign.errors import ConfigError, RealignError

Results = TypeVar("Results")


@dataclass(frozen=True)
class Demo:
    """What was asked for on the command line."""

    seed: int
    shuffle: bool
    output_dir: Path
    overrides: Mapping[str, Sequence[str]]
    """Of each run: those of the last one under "", those of the others, given as `RUN.KEY=VALUE`, under its name."""

    @classmethod
    def parse(cls, arguments: Sequence[str], *, name: str, runs: Sequence[str]) -> Demo:
        """Take the demo's own settings out of `key=value` arguments; the rest are overrides of the runs.

        Args:
            arguments: of the command line.
            name: of the demo; the default of `output_dir` has it.
            runs: names of the runs before the last one.

        Raises:
            ConfigError: a setting of the demo is none of its choices.
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
            raise ConfigError(f"seed must be a whole number, found {own['seed']!r}")
        if own["shuffle"] not in ("true", "false"):
            raise ConfigError(f"shuffle must be true or false, found {own['shuffle']!r}")
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
) -> int:
    """Run a demo; the last line of stdout is one JSON object.

    Args:
        arguments: of the command line.
        name: of the demo.
        subject: what it is about, in a few words.
        runs: names of the runs before the last one.
        train: does the work; a RealignError is a configuration error, found before anything was touched.
        show: prints what came of it and returns the JSON object.

    Returns:
        The exit status.
    """
    transformers.utils.logging.disable_progress_bar()  # the bars of reading and writing a tiny model only flicker
    transformers.utils.logging.set_verbosity_error()  # that a new head is new, it reports at length
    console = Console()
    try:
        demo = Demo.parse(arguments, name=name, runs=runs)
        console.print(f"[bold]realign {name}[/]: {subject}, seed {demo.seed}; everything goes to {demo.output_dir}")
        results = train(demo, console)
    except (RealignError, ImportError) as error:  # an extra that is not installed is an ImportError that names it
        print(f"realign: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("realign: interrupted", file=sys.stderr)
        return 130
    print(json.dumps(show(demo, console, results)), flush=True)
    return 0


def remove_earlier(folder: Path, left: Set[str]) -> None:
    """Remove what an earlier demo left in `folder`, and nothing else.

    Args:
        folder: of the demo.
        left: names of all that the demo puts there.

    Raises:
        ConfigError: the folder holds something that no demo put there.
    """
    if not folder.is_dir():
        return
    if foreign := sorted({path.name for path in folder.iterdir()} - left):
        raise ConfigError(
            f"output_dir {str(folder)!r} holds {foreign[0]!r}, which is not the demo's; choose another one"
        )
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def median(values: Sequence[float]) -> float:
    """The upper median; 0 of nothing."""
    return sorted(values)[len(values) // 2] if values else 0.0
