"""`realign check`: run everything except training, to find configuration errors early."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from realign.api import SequenceSample
from realign.cli.memory_table import print_memory
from realign.draw import to_text
from realign.engines.shared_model import shared_roles
from realign.runtime import Experiment, LocalRuntime
from realign.runtime.backend import cluster_for, open_runtime
from realign.runtime.calls import call
from realign.runtime.checkpoint.resume import find_start
from realign.runtime.checkpoint.state import check_frozen, frozen_weights, restore
from realign.runtime.checks.launch import writable
from realign.runtime.checks.memory import estimate, longest_prompt
from realign.runtime.metrics.data_row import show_row
from realign.runtime.metrics.samples import spoken

ROWS = 2
RESPONSES = 3  # responses shown per prompt
GIB = 2**30


def verdict(n: int) -> str:
    """Return the last line of the check."""
    if not n:
        return "All good: nothing was trained, nothing was written."
    found = "1 warning" if n == 1 else f"{n} warnings"
    return f"Finished with {found} (see above): nothing was trained, nothing was written."


@contextmanager
def counted_warnings() -> Iterator[Counter[str]]:
    """Count the distinct warnings that are shown, both those of `warnings` and those that are logged."""
    shown: Counter[str] = Counter()
    show, factory = warnings.showwarning, logging.getLogRecordFactory()

    def counted(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        shown[str(message)] += 1
        show(message, category, *where, **more)

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = factory(*args, **kwargs)
        if made.levelno >= logging.WARNING and made.name.split(".")[0] == "realign":
            shown[made.getMessage()] += 1
        return made

    warnings.showwarning = counted
    logging.setLogRecordFactory(record)
    try:
        yield shown
    finally:
        warnings.showwarning = show
        logging.setLogRecordFactory(factory)


def preflight(experiment: Experiment, console: Console) -> None:
    """Show graph, disk, devices and memory, load models and data, and run all calls except training on two prompts.

    Raises:
        RealignError: a step of the check fails, or the run cannot resume from the checkpoint; names the reason.
        OSError: `output_dir` cannot be written.
    """

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say("\nGraph\n" + to_text(experiment.graph, shared_roles(experiment.models)))
    say("Disk\n  " + disk_line(experiment.output_dir))
    say("\nDevices\n  " + devices_line())
    print_memory(console, estimate(experiment), longest_prompt(experiment))
    start = find_start(experiment)
    if experiment.resume is not None:
        found = "no checkpoint: the run would start from step 0" if start is None else f"from {start.checkpoint.path}"
        say(f"\nResume\n  {found}")
    with cluster_for(experiment), closing(open_runtime(experiment)) as runtime:
        if start is not None:
            check_frozen(start.state["frozen"], frozen_weights(runtime))
            restore(runtime, start.state, experiment.resume_skip)
        held_out = sum(map(len, runtime.datasets.held_out.values()))
        kept = f", {held_out:,} held out for evaluation" if held_out else ""
        say(f"\nData\n  {runtime.dataset.describe()}{kept}\n")
        show_row(console, runtime.first_row())
        if runtime.known_answers:
            say("\nKnown answers" + "".join(f"\n  {line}" for line in runtime.known_answers))
        batch = run_calls(runtime)
        say(f"\nTwo prompts through every call except training\n{batch!r}")
        shown: Counter[str] = Counter()
        for record in runtime.readable(batch, ROWS):
            shown[record["id"]] += 1
            if shown[record["id"]] <= RESPONSES:
                say(f"  {spoken(record)}: reward {record['reward']}")


def run_calls(runtime: LocalRuntime) -> SequenceSample:
    """Run every call that does not train on the first `ROWS` prompts of the first step, and return the batch."""
    batch = runtime.batch(1)
    batch = batch.take(range(min(ROWS, len(batch))))
    for rpc in runtime.experiment.graph.order:
        if rpc.method != "train_step":
            model, interface = runtime.models[rpc.model], runtime.interfaces[rpc.model]
            batch, _ = call(rpc, model, interface, batch, runtime.experiment.microbatch, runtime.graph)
    return batch


def disk_line(output_dir: Path) -> str:
    """Return the free disk space of `output_dir`."""
    return f"{output_dir}: {shutil.disk_usage(writable(output_dir)).free / GIB:.1f} GiB free"


def devices_line() -> str:
    """Return the GPUs that torch sees, and the number of CPU threads that it uses."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    named = [f"{gpu.name} ({gpu.total_memory / GIB:.0f} GiB)" for gpu in gpus]
    return ", ".join([*named, f"CPU with {torch.get_num_threads()} threads"])
