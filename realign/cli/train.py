"""`realign <overrides>`: start a run, or a distributed run.

Under torchrun, only rank 0 reads the command line and composes the config. It sends the config to the other ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from realign.cli.arguments import compose_line
from realign.cli.exit_codes import describe, exit_code, run_guarded
from realign.config.errors import ConfigError
from realign.errors import ExitCode, TransientError
from realign.own_files import OwnFiles, make_folder, replace_text
from realign.signals import raise_on_signals

if TYPE_CHECKING:
    from rich.console import Console

    from realign.config import ExperimentConfig
    from realign.config.composition import Composed
    from realign.runtime import Experiment
    from realign.runtime.processes.rendezvous import Rendezvous

Start: TypeAlias = "Callable[[ExperimentConfig, Experiment, Callable[[], None]], int]"
"""Function that runs the experiment built from a config, and returns the exit code. The last argument is called when
the checks have passed."""
_LOG_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"


def train(args: argparse.Namespace, words: list[str], start: Start) -> int:
    """Compose a command line, and run `start` on the run.

    Also handles `--cfg` and `--info`, which start no run.

    Returns:
        The exit code.
    """
    composed = compose_line(words, args.config_dir)
    if args.cfg or args.info:
        _show(composed, args)
        return 0
    config = composed.resolve()
    experiment = build(config)
    with raise_on_signals():
        return start(config, experiment, partial(record_launch, composed, config.output_dir))


def record_launch(composed: Composed, output_dir: str) -> None:
    """Record the config, and configure the logs like Hydra."""
    record(composed, output_dir)
    # Without force, this does nothing if an imported library has added a handler.
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT, stream=sys.stdout, force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request, so for each call of an agent
    verbose = composed.hydra.get("verbose") or []
    for name in verbose if isinstance(verbose, list) else [verbose]:
        logging.getLogger(None if name is True else name).setLevel(logging.DEBUG)


def record(composed: Composed, output_dir: str) -> None:
    """Write the config and the overrides to `.hydra` in the folder of the run."""
    from omegaconf import OmegaConf

    folder = Path(output_dir)
    parts: dict[str, Any] = {"config": composed.tree, "overrides": list(composed.typed)}
    OwnFiles(folder).claim(*(f".hydra/{name}.yaml" for name in parts))
    make_folder(folder / ".hydra")
    for name, part in parts.items():
        replace_text(folder / ".hydra" / f"{name}.yaml", OmegaConf.to_yaml(OmegaConf.create(part)))


def _show(composed: Composed, args: argparse.Namespace) -> None:
    """Print the config (`--cfg`), or the files that it consists of (`--info`)."""
    from omegaconf import OmegaConf

    from realign.config.secret_variables import without_secrets

    if args.info:
        files = "\n".join(f"  {file.source}" for file in composed.below.files)
        dropped = "".join(f"\n  {key}" for key in composed.tree["dropped"])
        print(f"Files, the lowest layer first:\n{files}\nDiscarded keys:{dropped or ' none'}")
        return
    shown = composed.with_hydra()
    for key in {"job": ["hydra"], "hydra": list(composed.tree), "all": []}[args.cfg]:
        del shown[key]
    with without_secrets():
        if args.resolve:
            OmegaConf.resolve(shown)
        part = shown if args.package in (None, "_global_") else OmegaConf.select(shown, args.package)
    if part is None:
        raise ConfigError(f"--package {args.package}: the config has no such key")
    if not OmegaConf.is_config(part):
        print(part)
        return
    head = "" if part is shown else f"# @package {args.package}\n"
    print(head + OmegaConf.to_yaml(part), end="")


def alone(
    experiment: Experiment, checked: Callable[[], None], debug: bool, command: Sequence[str] | None = None
) -> int:
    """Execute a run in this process, and return the exit code.

    Args:
        experiment: The run.
        checked: Called when the checks of the run have passed.
        debug: Whether to print the traceback of every error.
        command: Words of the command line.
    """
    return run_guarded(partial(run_alone, experiment, checked, command, console()), debug)


def run_alone(
    experiment: Experiment, checked: Callable[[], None], command: Sequence[str] | None, shown: Console
) -> None:
    """Execute a run in this process.

    Args:
        experiment: The run.
        checked: Called when the checks of the run have passed.
        command: Words of the command line that repeats the run; None if there is none.
        shown: Where the launch table and the progress are shown.
    """
    from realign.records.checkpoint.last_failure import record_end, recorder
    from realign.runtime import run
    from realign.runtime.processes.watchdog import watch_for

    watch = watch_for(experiment.runtime)
    watch.record = recorder(experiment.output_dir, secrets.token_hex(8))
    begin = _make_on_begin(experiment, checked, shown)
    try:
        run(experiment, console=shown, watch=watch, command=command, begin=begin)
    except (Exception, KeyboardInterrupt) as error:
        watch.record(error, exit_code(error))
        raise
    record_end(experiment.output_dir, ExitCode.success)


def is_one_of_many() -> bool:
    """Return whether a launcher such as torchrun started this process as one of several. Does not import torch."""
    return os.environ.get("WORLD_SIZE", "") not in ("", "1")


def run_on_ranks(command: Callable[[Start], int], debug: bool, words: Sequence[str] | None = None) -> int:
    """Run one command line on all ranks: rank 0 executes `command`, and the other ranks join the run that it starts.

    Returns:
        The exit code, identical on all ranks: that of the first rank that failed, or 0.
    """
    # without a server, torch's store prints the C++ stack of each failed request at level WARNING
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from realign.config.composition import config_of
    from realign.ranks import ranks_of_launcher
    from realign.runtime.processes.rendezvous import connect

    try:
        if (ranks := ranks_of_launcher()).size > 1:
            with raise_on_signals(), connect(ranks, partial(describe, debug=debug)) as rendezvous:
                if ranks.leader:
                    _run_as_leader(rendezvous, command, words)
                else:
                    _silence()
                    if config := rendezvous.broadcast():
                        _run_together(rendezvous, build(config_of(json.loads(config))), None)
            return 0
    except SystemExit as error:  # the first rank that failed has printed why
        return int(error.code or 0)
    except (ConfigError, TransientError) as error:
        if _another_rank_prints(error):
            return exit_code(error)
        raise
    return command(lambda _, experiment, checked: alone(experiment, checked, debug, words))  # no rendezvous address


def _another_rank_prints(error: Exception) -> bool:
    """Return whether the first rank of this machine prints an error that occurs before the ranks are connected.

    All ranks of a machine have the same address and number of ranks. Only `RANK` differs.
    """
    return os.environ.get("LOCAL_RANK", "0") != "0" and not str(error).startswith("RANK=")


def _run_as_leader(rendezvous: Rendezvous, command: Callable[[Start], int], words: Sequence[str] | None) -> None:
    def start(config: ExperimentConfig, experiment: Experiment, checked: Callable[[], None]) -> int:
        rendezvous.broadcast(json.dumps(dataclasses.asdict(config)))
        _run_together(rendezvous, experiment, checked, words)
        return 0

    if code := command(start):
        rendezvous.watch.exit_all(code)
    rendezvous.broadcast()  # if the command started no run, ranks wait for this; after a run, nobody reads it


def _run_together(
    rendezvous: Rendezvous,
    experiment: Experiment,
    checked: Callable[[], None] | None,
    words: Sequence[str] | None = None,
) -> None:
    """Execute a run on several ranks. Only the first rank has `checked`, and shows progress."""
    from realign.records.checkpoint.last_failure import record_end, recorder
    from realign.runtime import run

    shown = None if checked is None else console()
    begin = None if checked is None or shown is None else _make_on_begin(experiment, checked, shown)
    watch = rendezvous.watch
    watch.record = recorder(experiment.output_dir, rendezvous.attempt)
    with rendezvous.process_group(experiment.runtime.call_minutes):
        run(experiment, console=shown, watch=watch, command=words, begin=begin)
    if checked is not None:
        record_end(experiment.output_dir, ExitCode.success)


def build(config: ExperimentConfig) -> Experiment:
    """Build the experiment of a config, and set the number of torch threads.

    Raises:
        ConfigError: the config is invalid; names the key.
    """
    import torch

    from realign.config import build_experiment

    if config.threads is not None:
        if config.threads < 1:
            raise ConfigError(f"threads={config.threads}: must be at least 1, or null")
        torch.set_num_threads(config.threads)
    return build_experiment(config)


def build_experiment_of(words: Sequence[str], config_dir: str | None) -> Experiment:
    """Compose a command line, and build its experiment.

    Raises:
        ConfigError: the config is invalid; names the key.
    """
    return build(compose_line(words, config_dir).resolve())


def print_derived(experiment: Experiment, shown: Console) -> list[tuple[str, str]]:
    """Print the run summary on a rich console, and return its rows."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from realign.cli.launch_table import derived_rows

    table = Table(title=f"{escape(experiment.name)}: run summary", title_justify="left", box=None)
    table.add_column("", style="bold")
    table.add_column("", overflow="fold")
    rows = derived_rows(experiment)
    for name, value in rows:
        table.add_row(name, Text(value))
    shown.print(table)
    return rows


def _make_on_begin(experiment: Experiment, checked: Callable[[], None], shown: Console) -> Callable[[], str]:
    """Return what a run calls once its checks have passed: print the run summary, and return it for realign.log."""

    def begin() -> str:
        checked()
        rows = print_derived(experiment, shown)
        width = max(len(name) for name, _ in rows)
        return "\n".join([f"{experiment.name}: run summary", *(f"  {name:<{width}}  {value}" for name, value in rows)])

    return begin


def console() -> Console:
    """Return the console for the progress of a run, without the progress bars of transformers in its live display."""
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return Console()


def _silence() -> None:
    """Suppress warnings and progress bars on ranks other than 0, which would repeat those of rank 0."""
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
