"""`realign plan`: print the placements of an experiment with the highest predicted throughput."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from realign.api.sampler import SamplerSpec
from realign.config.words import words_of
from realign.planning.measured import calibrated, read_runs, with_measured_lengths
from realign.planning.options import PlanOptions
from realign.planning.placements import LAUNCHERS, launcher, notes, overrides
from realign.planning.predict import Cluster, Prediction
from realign.planning.search import Search, search
from realign.planning.workload import Workload, workload_of
from realign.runtime import Experiment

GB = 1e9
INEXPRESSIBLE = (
    "rollout workers and the in-process sampler compute with tensor parallelism (each needs all weights)",
    "servers share the devices of the trainer (sleep and wake)",
    "pipeline parallelism, and the tensor parallelism of single roles in one group",
)
"""Placements that no config expresses."""


def plan_and_print(experiment: Experiment, options: PlanOptions, words: Sequence[str], console: Console) -> None:
    """Search placements and print the best ones.

    Args:
        experiment: the experiment, without loaded models.
        options: the cluster.
        words: overrides of the command line, which precede those of a placement.
        console: where to print.

    Raises:
        RealignError: a model or a run folder cannot be read, or the experiment has no rollouts.
    """
    server = next((word for word in LAUNCHERS if word in words_of(SamplerSpec)), None)
    load = workload_of(experiment, options)
    cluster = Cluster(options, options.described_device())
    if options.runs:
        steps = read_runs(options.folders, load)
        options = with_measured_lengths(options, steps, load)
        load = workload_of(experiment, options)
        cluster = calibrated(Cluster(options, options.described_device()), load, steps)
    result = search(load, cluster, servers=server is not None)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for line in described_inputs(load, cluster):
        say(line)
    say(f"{result.considered} placements, of which {result.fitting} fit the memory.\n")
    console.print(plan_table(result, cluster))
    for number, prediction in enumerate([*result.best, *result.too_large], 1):
        say(f"\n{number}  {command_line(prediction, load, options, words, server or '')}")
        for note in notes(prediction.placement, load, options):
            say(f"   {note}")
    if server is None:
        say("\nNot considered: inference servers, for which this version has no models.ROLE.sampler.")
    say("\nNo config expresses these placements: " + "; ".join(INEXPRESSIBLE) + ".")


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
    for name in ("", "placement", "max_staleness", "tokens/s", "s/step", "mean staleness", "GB per device", "fits"):
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
            ", ".join(f"{name} {memory.total / GB:.3g}" for name, memory in prediction.memory.items()),
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


__all__ = ["plan_and_print"]
