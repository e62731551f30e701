"""`realign plan`: print the placements of an experiment with the highest predicted throughput."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from realign_planner.internals import build, compose_line, split_options
from realign_planner.measured import calibrated, read_runs, with_measured_lengths
from realign_planner.options import PlanOptions
from realign_planner.placements import LAUNCHERS, launcher, notes, overrides
from realign_planner.predict import Cluster, Prediction
from realign_planner.search import Search, search
from realign_planner.workload import Workload, workload_of

GB = 1e9
INEXPRESSIBLE = (
    "rollout workers and the in-process sampler compute with tensor parallelism (each needs all weights)",
    "servers share the devices of the trainer (sleep and wake)",
    "other meshes than shard, for roles on separate devices",
)
"""Placements that no config expresses."""


def plan(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `realign plan`: search placements, and print those with the highest predicted throughput.

    Raises:
        RealignError: a model or a run folder cannot be read, or the experiment has no rollouts.
    """
    options, rest = split_options("plan", PlanOptions, words)
    composed = compose_line(rest, args.config_dir)
    experiment, console, server = build(composed.resolve()), Console(), next(iter(LAUNCHERS))
    load = workload_of(experiment, options)
    cluster = Cluster(options, options.described_device())
    if options.runs:
        steps = read_runs(options.folders, load)
        options = with_measured_lengths(options, steps, load)
        load = workload_of(experiment, options)
        cluster = calibrated(Cluster(options, options.described_device()), load, steps)
    result = search(load, cluster, servers=load.servers)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for line in described_inputs(load, cluster):
        say(line)
    say(f"{result.considered} placements, of which {result.fitting} fit the memory.\n")
    console.print(plan_table(result, cluster))
    for number, prediction in enumerate([*result.best, *result.too_large], 1):
        say(f"\n{number}  {command_line(prediction, load, options, composed.overrides, server)}")
        for note in notes(prediction.placement, load, options):
            say(f"   {note}")
    say("\nNo config expresses these placements: " + "; ".join(INEXPRESSIBLE) + ".")
    return 0


def described_inputs(load: Workload, cluster: Cluster) -> Iterator[str]:
    """Yield lines about the devices, the work and the source of the costs."""
    options, work = cluster.options, load.work
    device = cluster.device.accelerator
    limit = cluster.device.assumed.memory_used
    yield (
        f"Devices: {options.devices} x {options.device} on {options.nodes} node{'s' * (options.nodes > 1)}, "
        f"{device.memory / GB:.0f} GB each, of which {limit:.0%} is used ({cluster.device.source})"
    )
    models = ", ".join(f"{name} {role.network.weights / 1e9:.3g}B" for name, role in load.roles.items())
    yield f"Models: {models}"
    yield (
        f"Step: {work.batch_prompts:,} prompts x {work.group} responses; prompts of {work.prompt_tokens:.0f} tokens, "
        f"responses of {min(work.lengths.mean, work.lengths.most):.0f} on average and at most {work.lengths.most:.0f}; "
        f"rewards of {work.reward_s.mean if not isinstance(work.reward_s, tuple) else 0:.3g} s"
    )
    yield "Costs: " + (
        f"measured in {', '.join(options.folders)}; other numbers of devices follow from data sheets and assumptions"
        if options.runs
        else "data sheets and assumptions. Compare placements; plan.runs=FOLDER calibrates the seconds."
    )


def plan_table(result: Search, cluster: Cluster) -> Table:
    """Return the table of the best placements, and of faster ones that do not fit."""
    table = Table(box=None, title="Placements by predicted throughput", title_justify="left")
    for name in (
        "",
        "placement",
        "max_staleness",
        "tokens/s",
        "s/step",
        "mean staleness",
        "GB sent",
        "GB per device",
        "fits",
    ):
        table.add_column(name, justify="left" if name in ("", "placement", "GB per device", "fits") else "right")
    for number, prediction in enumerate([*result.best, *result.too_large], 1):
        bound = prediction.placement.max_staleness
        table.add_row(
            str(number),
            Text(prediction.placement.describe()),
            "sync" if bound is None else str(bound),
            _rounded(prediction.tokens_per_s),
            _rounded(prediction.step_s),
            f"{prediction.staleness:.1f}",
            f"{prediction.traffic / GB:.3g}",
            ", ".join(f"{name} {peak / GB:.3g}" for name, peak in prediction.memory.items()),
            "yes" if prediction.fits else Text("no", style="red"),
        )
    return table


def _rounded(x: float) -> str:
    """Return a number with three digits, or without decimals."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def command_line(
    prediction: Prediction, load: Workload, options: PlanOptions, words: Sequence[str], server: str
) -> str:
    """Return the command that runs a placement."""
    own = overrides(prediction.placement, load, options, server)
    return shlex.join([*launcher(prediction.placement, options), *words, *own])
