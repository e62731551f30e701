"""`realign profile`: run a few steps under the torch profiler, and print the time of each call."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

from realign.cli.arguments import split_options
from realign.cli.train import build_experiment_of, is_one_of_many
from realign.errors import ConfigError
from realign.records.checkpoint.random_generators import seed_random
from realign.runtime.checks.before_loading import check_ready
from realign.runtime.profiling import TRACE, ProfileOptions, StepProfile, profile_steps
from realign.runtime.resume import find_start
from realign.runtime.run_checkpoints import check_frozen, frozen_weights, restore
from realign.runtime.run_experiment import cluster_for, open_runtime

FOLDER = "profile"
"""Folder of the trace in the folder of the run."""


def profile(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `realign profile`: run steps from the start or from a checkpoint, and print their times. Saves nothing else.

    Raises:
        ConfigError: the command runs under torchrun, or the run has too few steps.
        RealignError: the run cannot be loaded or resumed.
    """
    options, overrides = split_options("profile", ProfileOptions, words)
    disable_progress_bar()
    experiment, console = build_experiment_of(overrides, args.config_dir), Console()
    if is_one_of_many():
        raise ConfigError("realign profile: it profiles one process. Start it without torchrun.")
    check_ready(experiment)
    start = find_start(experiment)
    done = 0 if start is None else start.step
    seed_random(experiment.seed)
    folder = experiment.output_dir / FOLDER
    with cluster_for(experiment), closing(open_runtime(experiment)) as runtime:
        if start is not None:
            check_frozen(start.state["frozen"], frozen_weights(runtime))
            restore(runtime, start.state, experiment.resume_skip)
            runtime.batches_ahead = runtime.prompts.drawn - start.step
        with console.status(f"running {options.last} steps"):
            steps = profile_steps(runtime, options, done, folder)
    console.print(profile_table(steps))
    if experiment.runtime.starts_workers:
        console.print("Operators run in worker processes, and are not in the trace.", soft_wrap=True)
    console.print(f"\nTrace: {folder / TRACE} (open it in ui.perfetto.dev)", markup=False, soft_wrap=True)
    return 0


def profile_table(profile: StepProfile) -> Table:
    """Return the table of calls."""
    last = profile.first + profile.steps - 1
    title = f"Steps {profile.first} to {last}: {profile.step_s:.3g} s per step under the profiler"
    table = Table(box=None, title=title, title_justify="left")
    table.add_column("call")
    for name in ("s/step", "% of step", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column(f"operators by self time ({profile.device}, s/step over all threads)")
    for call in profile.calls:
        rate = "-" if call.tokens_per_s is None else f"{call.tokens_per_s:,.0f}"
        top = ", ".join(f"{name} {seconds:.2g}" for name, seconds in call.operators.items())
        table.add_row(call.name, f"{call.seconds:.3g}", f"{100 * call.fraction:.0f}", rate, Text(top or "-"))
    return table
