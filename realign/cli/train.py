"""`realign <overrides>`: a Hydra application that starts a run, a sweep, or a distributed run.

Under torchrun, only rank 0 reads the command line and runs as a Hydra application. It sends the composed config to the
other ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from realign.cli.exit_codes import described, exit_code, guarded
from realign.config.errors import ConfigError
from realign.errors import ExitCode, TransientError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from realign.config import ExperimentConfig
    from realign.runtime import Experiment
    from realign.runtime.processes.rendezvous import Meeting

Start: TypeAlias = "Callable[[ExperimentConfig], int]"
"""Function that runs a composed config and returns the exit code."""
SLURM = "submitit_slurm"


def train(args: argparse.Namespace, overrides: list[str], start: Start) -> int:
    """Validate the command line, and run `start` on the config of one run or of each run of a sweep.

    Also handles `--cfg` and `--info`, which start no run.

    Returns:
        The exit code.
    """
    from realign.config import compose
    from realign.config.composition import check_launch, register_schema, search_path
    from realign.config.loader import run_application, show_config, show_info

    launcher = check_launch(overrides, args.config_dir)
    if args.multirun:
        _check_sweep(overrides, launcher)
    if not (args.multirun or args.cfg or args.info):
        _check_start(build(compose(overrides, args.config_dir)))  # before Hydra creates its folder

    folders: list[Path] = []

    def job(composed: DictConfig) -> None:
        config = _config_of_job(composed)
        folders.append(Path(config.output_dir))
        if code := start(config):
            raise SystemExit(code)

    words = [*search_path(args.config_dir), *overrides]
    register_schema()
    if args.cfg:
        show_config(words, args.cfg, args.package, args.resolve)
        return 0
    if args.info:
        show_info(words, args.info)
        return 0
    with _terminated_by_exception():
        try:
            done = run_application(job, words, args.multirun)
            folders = folders or done  # a launcher may have started the runs in other processes
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 1
        finally:
            if args.multirun:
                _print_sweep(folders)
    return 0


def _print_sweep(folders: Sequence[Path]) -> None:
    """Print the runs of a sweep."""
    from rich.console import Console

    from realign.cli.sweep import sweep_table

    if (table := sweep_table(folders)) is not None:
        Console().print(table)


def _check_sweep(overrides: Sequence[str], launcher: str) -> None:
    if given := [word for word in overrides if word.lstrip("+").startswith("resume=")]:
        raise ConfigError(
            f"{given[0]}: a sweep (-m) always starts new runs. Resume the runs of a sweep one by one, with resume=auto "
            "and the output_dir of the run."
        )
    if is_one_of_many():
        raise ConfigError(
            "-m: a sweep cannot run under torchrun, which starts the ranks of one run. Start each run separately."
        )

    if launcher == SLURM and not shutil.which("srun"):
        raise ConfigError(
            f"hydra/launcher={SLURM}: the command srun was not found. Start the sweep on a Slurm cluster, or use "
            "hydra/launcher=submitit_local."
        )


def _check_start(experiment: Experiment) -> None:
    """Check that the run can start."""
    from realign.runtime.checks.before_loading import check_ready, open_interfaces, used_interfaces
    from realign.runtime.output_folder import check_output_folder

    check_output_folder(experiment)
    check_ready(experiment)
    try:
        open_interfaces(experiment)
    finally:
        for interface in used_interfaces(experiment).values():
            interface.close()


def _config_of_job(composed: DictConfig) -> ExperimentConfig:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from realign.config.composition import resolve

    config = resolve(composed)
    hydra = HydraConfig.get()
    if hydra.mode is RunMode.MULTIRUN:
        config.output_dir = hydra.runtime.output_dir  # each job of a sweep has a separate folder
    return config


def alone(config: ExperimentConfig, debug: bool, command: Sequence[str] | None = None) -> int:
    """Execute a run in this process, and return the exit code. `command` contains the words of the command line."""

    def make() -> None:
        from realign.runtime import run
        from realign.runtime.checkpoint.last_failure import record_end, recorder
        from realign.runtime.output_folder import check_output_folder
        from realign.runtime.processes.watchdog import watchdog_for

        experiment = build(config)
        check_output_folder(experiment)
        watch = watchdog_for(experiment.runtime)
        watch.record = recorder(experiment.output_dir, secrets.token_hex(8))
        try:
            described = described_run(experiment)
            run(experiment, console=_console(experiment), watch=watch, command=command, description=described)
        except (Exception, KeyboardInterrupt) as error:
            watch.record(error, exit_code(error))
            raise
        record_end(experiment.output_dir, ExitCode.success)

    return guarded(make, debug)


def is_one_of_many() -> bool:
    """Return whether a launcher such as torchrun started this process as one of several. Does not import torch."""
    return os.environ.get("WORLD_SIZE", "") not in ("", "1")


def on_ranks(command: Callable[[Start], int], debug: bool, words: Sequence[str] | None = None) -> int:
    """Run one command line on all ranks: rank 0 executes `command`, and the other ranks join the run that it starts.

    Returns:
        The exit code, identical on all ranks: that of the first rank that failed, or 0.
    """
    # without a server, torch's store prints the C++ stack of each failed request at level WARNING
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from realign.config.composition import config_of
    from realign.engines.distributed.ranks import launched
    from realign.runtime.processes.rendezvous import met

    meeting: Meeting | None = None
    try:
        if (ranks := launched()).size > 1:
            with _terminated_by_exception(), met(ranks, partial(described, debug=debug)) as meeting:
                meeting.check_in()
                if ranks.leader:
                    return _led(meeting, command, words)
                _quiet()
                if plan := meeting.plan():
                    _take_part(meeting, config_of(json.loads(plan)))
                return 0
    except BaseException as error:
        if meeting is not None:
            return meeting.watch.code  # the first rank that failed has reported the reason
        if isinstance(error, ConfigError | TransientError) and _another_rank_prints(error):
            return exit_code(error)
        raise
    return command(lambda config: alone(config, debug, words))  # no rendezvous address is set


def _another_rank_prints(error: Exception) -> bool:
    """Return whether the first rank of this machine prints an error that occurs before the ranks are connected.

    All ranks of a machine have the same address and number of ranks. Only `RANK` differs.
    """
    return os.environ.get("LOCAL_RANK", "0") != "0" and not str(error).startswith("RANK=")


def _led(meeting: Meeting, command: Callable[[Start], int], words: Sequence[str] | None) -> int:
    def start(config: ExperimentConfig) -> int:
        try:
            with meeting.watch.telling():  # inside the Hydra job, because Hydra would add another message
                meeting.plan(json.dumps(dataclasses.asdict(config)))
                _take_part(meeting, config, words)
        except Exception:
            return meeting.watch.code
        return 0

    if code := command(start):
        meeting.watch.leave(code)
    meeting.plan("")  # the command started no run
    return 0


def _take_part(meeting: Meeting, config: ExperimentConfig, words: Sequence[str] | None = None) -> None:
    from realign.runtime import run
    from realign.runtime.checkpoint.last_failure import record_end, recorder

    experiment = build(config)
    leads = meeting.ranks.leader
    console = _console(experiment) if leads else None
    meeting.watch.record = recorder(experiment.output_dir, meeting.attempt)
    with meeting.joined(experiment.runtime.call_minutes):
        description = described_run(experiment) if leads else ""
        run(experiment, console=console, watch=meeting.watch, command=words, description=description)
    if leads:
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


def print_derived(experiment: Experiment, console: Any) -> None:
    """Print the run summary on a rich console."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from realign.cli.launch_table import derived_rows

    table = Table(title=f"{escape(experiment.name)}: run summary", title_justify="left", box=None)
    table.add_column("", style="bold")
    table.add_column("")
    for name, value in derived_rows(experiment):
        table.add_row(name, Text(value))
    console.print(table)


def described_run(experiment: Experiment) -> str:
    """Return the run summary as text, for realign.log."""
    from realign.cli.launch_table import derived_rows

    rows = derived_rows(experiment)
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"{experiment.name}: run summary", *(f"  {name:<{width}}  {value}" for name, value in rows)])


def quiet_transformers() -> None:
    """Disable the progress bars of transformers, which would break the live display."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _console(experiment: Experiment) -> Any:
    """Return the console for the progress of a run, after printing the run summary."""
    from rich.console import Console

    console = Console()
    print_derived(experiment, console)
    quiet_transformers()
    return console


def _quiet() -> None:
    """Suppress warnings and progress bars on ranks other than 0, which would repeat those of rank 0."""
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    quiet_transformers()


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """Raise an exception on SIGTERM, so that it ends a run like Ctrl-C: files are closed and workers stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set signal handlers
        return

    def stop(number: int, frame: FrameType | None) -> None:
        from realign.runtime.processes.signals import (
            Interrupted,  # imported late: the package takes a second to import, and --cfg does not need it
        )

        raise Interrupted(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
