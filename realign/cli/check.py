"""`realign check`: run everything except training, to find configuration errors early."""

from __future__ import annotations

import argparse
import logging
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from realign.api import SequenceSample
from realign.api.memory import RoleMemory
from realign.api.rewards import Verifier
from realign.cli.train import build_experiment_of, print_derived
from realign.draw import to_text
from realign.engines.shared_model import shared_roles
from realign.errors import RewardError
from realign.records.diagnosis import RunRecords, diagnose
from realign.records.metrics.samples import as_one_line, show_row
from realign.rewards.attack import READ, RewardCheck, attack
from realign.runtime import Experiment, LocalRuntime
from realign.runtime.calls import call
from realign.runtime.checks.auto_memory import with_memory_choices
from realign.runtime.checks.before_loading import check_ready, try_interfaces, writable
from realign.runtime.checks.device_estimate import DeviceEstimate, estimate, free_memory, longest_prompt, show
from realign.runtime.checks.meshes import describe_meshes
from realign.runtime.resume import find_start
from realign.runtime.run_checkpoints import check_frozen, frozen_weights, restore
from realign.runtime.run_experiment import cluster_for, open_runtime
from realign.text import visible

ROWS = 2
RESPONSES = 3  # responses shown per prompt
GIB = 2**30
KINDS = ("weights", "optimizer", "gradients", "activations", "head", "KV cache", "rollout", "peak of a call")
"""Rows of the memory table."""


def check(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run `realign check`: everything except training."""
    console = Console()
    with count_warnings() as shown:
        experiment = build_experiment_of(overrides, args.config_dir)
        check_ready(experiment)
        try_interfaces(experiment)
        print_derived(experiment, console)
        disable_progress_bar()
        preflight(experiment, console)
    caches = keeps_tokens(experiment.resolved)
    console.print(f"\n{verdict(len(shown), caches=caches)}", markup=False, highlight=False, soft_wrap=True)
    return 0


def keeps_tokens(node: Any) -> bool:
    """Return whether some data of a config has `cache=true`."""
    inner = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
    return (isinstance(node, Mapping) and node.get("cache") is True) or any(map(keeps_tokens, inner))


def verdict(n: int, *, caches: bool = False) -> str:
    """Return the last line of the check after `n` warnings; with `caches`, it may have added to the cache folder."""
    done = f"nothing was trained, nothing was written{' outside of the cache folder' * caches}."
    if not n:
        return f"All good: {done}"
    count = "1 warning" if n == 1 else f"{n} warnings"
    return f"Finished with {count} (see above): {done}"


@contextmanager
def count_warnings() -> Iterator[Counter[str]]:
    """Count the distinct warnings that are shown, both those of `warnings` and those that are logged."""
    shown: Counter[str] = Counter()
    show, factory = warnings.showwarning, logging.getLogRecordFactory()

    def count_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        shown[str(message)] += 1
        show(message, category, *where, **more)

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        entry = factory(*args, **kwargs)
        if entry.levelno >= logging.WARNING and entry.name.split(".")[0] == "realign":
            shown[entry.getMessage()] += 1
        return entry

    warnings.showwarning = count_warning
    # The factory sees the records of every logger, whatever handlers and levels of handlers the user has.
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
    out = experiment.output_dir
    say(f"Disk\n  {out}: {shutil.disk_usage(writable(out)).free / GIB:.1f} GiB free")
    say("\nDevices\n  " + _devices_line())
    for role, mesh in describe_meshes(experiment).items():
        say(f"  {role}: {mesh}")
    free = cache(free_memory)  # also of the second estimate: the memory before the models are loaded
    settled = with_memory_choices(experiment, free)
    print_memory(console, estimate(settled, free=free), longest_prompt(experiment))
    start = find_start(experiment)
    if experiment.resume is not None:
        source = "no checkpoint: the run would start from step 0" if start is None else f"from {start.checkpoint.path}"
        say(f"\nResume\n  {source}")
    with cluster_for(experiment), closing(open_runtime(experiment)) as runtime:
        if start is not None:
            check_frozen(start.state["frozen"], frozen_weights(runtime))
            restore(runtime, start.state, experiment.resume_skip)
        held_out = sum(map(len, runtime.datasets.held_out.values()))
        others = f", {held_out:,} held out for evaluation" if held_out else ""
        say(f"\nData\n  {runtime.dataset.describe()}{others}")
        if columns := experiment.data.describe_columns():
            say(f"  {visible(columns)}")
        longest = _longest_of_data(runtime)
        devices = estimate(settled, longest, free)
        if longest is not None:
            what = "prompt" if experiment.longest_response else "row"
            for device in devices:
                say(f"  the longest {what} has {longest:,} tokens; estimate with it: {summary(device)}")
        # The others were reported before anything was loaded.
        _warn_memory(device for device in devices if device.holds_weights)
        say("")
        show_row(console, runtime.first_row())
        if runtime.known_answers:
            say("\nKnown answers" + "".join(f"\n  {line}" for line in runtime.known_answers))
        for role, interface in runtime.interfaces.items():
            if isinstance(interface, Verifier):
                say(f"\nWrong answers\n  interfaces.{role}: {_attack(runtime, role, interface)}")
        batch = _run_calls(runtime)
        say(f"\nTwo prompts through every call except training\n{batch!r}")
        shown: Counter[str] = Counter()
        records = runtime.readable(batch, ROWS)
        for record in records:
            shown[record["id"]] += 1
            if shown[record["id"]] <= RESPONSES:
                say(f"  {as_one_line(record)}: reward {record['reward']}")
        _warn_of_equal_rewards(runtime, records, batch)


def print_memory(console: Console, devices: Sequence[DeviceEstimate], prompt: int) -> None:
    """Print the estimate of each role and device, and warn about devices that are too small for the weights.

    Args:
        console: where to print.
        devices: the estimates.
        prompt: length of the longest prompt that the estimate assumes, in tokens.
    """
    if not devices:
        return
    table = Table(box=None, pad_edge=False)
    rows = [(role, cells(memory)) for device in devices for role, memory in device.roles.items()]
    for role in ("", *(role for role, _ in rows)):
        table.add_column(role, justify="right" if role else "left", overflow="fold")
    for i, kind in enumerate(KINDS):
        table.add_row(kind, *(values[i] for _, values in rows))
    # above the table, which would break its title into lines as narrow as its columns
    console.print(f"\nMemory (estimate, prompts of up to {prompt:,} tokens)", highlight=False, soft_wrap=True)
    console.print(table)
    for device in devices:
        console.print(summary(device), markup=False, highlight=False, soft_wrap=True)
    _warn_memory(device for device in devices if not device.holds_weights)


def _warn_memory(devices: Iterable[DeviceEstimate]) -> None:
    """Warn about devices that are too small."""
    for device in devices:
        for problem in device.problems():
            warnings.warn(problem, stacklevel=2)


def cells(role: RoleMemory) -> list[str]:
    """Return the sizes of a role, in the order of `KINDS`; empty where a role needs nothing."""
    sizes = (
        role.weights + role.references,
        role.moments + role.average,
        role.gradients,
        role.activations or role.scoring,
        role.head,
        role.cache,
        role.rollout_weights + role.rollout_work,
        role.passing,
    )
    return [show(size) if size else "" for size in sizes]


def summary(device: DeviceEstimate) -> str:
    """Return the line of a device: memory between calls, peak and free memory."""
    processes = f" in {device.processes} processes" if device.processes > 1 else ""
    free = "" if device.free is None else f", {show(device.free)} free"
    return f"{device.device}{processes}: {show(device.kept)} between calls, peak {show(device.peak)}{free}"


def _attack(runtime: LocalRuntime, role: str, verifier: Verifier) -> RewardCheck | str:
    """Return what wrong answers earn from a reward function, and warn if it is as much as right ones."""
    if reason := verifier.why_not_attacked():
        return f"not tried ({reason}). To try a function of Python alone, use realign.check_reward"
    size, model = runtime.dataset.size, runtime.models[role]
    data = runtime.prompts.preview(range(runtime.prompts.batch_prompts if size is None else min(size, READ)))
    if "prompt_ids" not in data or "row" not in data.metadata:
        return "not tried (the data has no prompts with rows)"
    prompts = model.tokenizer.batch_decode(
        [ids.tolist() for ids in data.sequences("prompt_ids")], skip_special_tokens=True
    )

    def score(index: int, texts: Sequence[str]) -> list[float]:
        return verifier.score_texts(model, data.take([index]), [texts]).tolist()

    try:
        found = attack(data.metadata["row"], prompts, score, verifier.known_answer, verifier.known_answer_template)
    except RewardError as error:
        return f"stopped, since the function fails on them: {error}"
    if found.findings:
        kinds = ", ".join(finding.kind for finding in found.findings)
        warnings.warn(
            f"interfaces.{role}: wrong answers earn as much as right ones ({kinds}; see above). A policy finds them. "
            "docs/guides/rewards.md#try-wrong-answers has remedies.",
            stacklevel=2,
        )
    return found


def _warn_of_equal_rewards(runtime: LocalRuntime, records: Sequence[Mapping[str, Any]], batch: SequenceSample) -> None:
    """Warn if all sampled responses fail alike, in the words of `realign why`."""
    step = {"step": 1, "zero_std_fraction": 1.0}
    if "truncated" in batch:
        step["truncated_fraction"] = float(batch["truncated"].float().mean())
    run = RunRecords([step], runtime.experiment.resolved or {}, records)
    if run.fails_alike:
        for cause in diagnose(run).causes:
            warnings.warn(cause.text(), stacklevel=2)


def _longest_of_data(runtime: LocalRuntime) -> int | None:
    """Return the length of the longest prompt of the data, or row if nothing is sampled; None for unread rows."""
    datasets = [runtime.dataset, *runtime.datasets.held_out.values()]
    if any(dataset.size is None for dataset in datasets):
        return None
    if runtime.experiment.longest_response:
        return max(dataset.longest_sequence for dataset in datasets) or None
    return runtime.dataset.longest_row or None


def _run_calls(runtime: LocalRuntime) -> SequenceSample:
    """Run every call that does not train on the first `ROWS` prompts of the first step, and return the batch."""
    batch = runtime.batch(1)
    batch = batch.take(range(min(ROWS, len(batch))))
    for rpc in runtime.experiment.graph.order:
        if rpc.method != "train_step":
            model, interface = runtime.models[rpc.model], runtime.interfaces[rpc.model]
            batch, _ = call(rpc, model, interface, batch, runtime.experiment.microbatch, runtime.graph)
    return batch


def _devices_line() -> str:
    """Return the GPUs that torch sees, and the number of CPU threads that it uses."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    named = [f"{gpu.name} ({gpu.total_memory / GIB:.0f} GiB)" for gpu in gpus]
    threads = torch.get_num_threads()
    return ", ".join([*named, f"CPU with {threads} thread{'s' * (threads != 1)}"])
