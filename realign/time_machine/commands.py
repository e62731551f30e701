"""`realign replay`, `fork` and `bisect`: go back to a step of a run."""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
from bdb import BdbQuit
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from realign.cli.train import is_one_of_many
from realign.config.command_line import quote_text
from realign.config.errors import ConfigError
from realign.errors import CheckpointError, ExitCode
from realign.own_files import replace_text
from realign.records.record_files import json_lines, json_object
from realign.report.files import flat_config, run_info
from realign.run_settings import is_free
from realign.text import visible
from realign.time_machine.earlier_run import check_writable, experiment_of, resolve_out, run_and_step, run_folder

if TYPE_CHECKING:
    from realign.records.checkpoint.folder import Checkpoint
    from realign.runtime import Experiment
    from realign.runtime.local import LocalRuntime
    from realign.time_machine.replay import ReplayedStep

MACHINE = ("time/", "rollout/")
"""Beginnings of metrics that depend on the machine: durations, and how far an asynchronous rollout is ahead."""


def replay(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `realign replay RUN STEP`: recompute a step, and write all that it computed."""
    from realign.time_machine.replay import replay_folder, write

    chosen = resolve_out(args.out)
    run, step = run_and_step("replay", words)
    out = replay_folder(run, step, chosen)
    check_writable(out)
    try:
        replayed = _replay(run, step, args.break_in, rescore=args.rescore)
    except BdbQuit:  # `q` in the debugger
        return ExitCode.success
    write(replayed, run, out)
    recorded = next((line for line in json_lines(run / "metrics.jsonl") if line.get("step") == step), None)
    print(f"Step {step} of {visible(str(run))}: {_verdict(replayed, recorded, args.tolerance)}")
    if recorded is not None and _find_differing(replayed, recorded, args.tolerance) and (reason := _processes(run)):
        print(reason)
    print(f"batch, rewards, values of tokens, gradients: {visible(str(out))}/batch.safetensors and step.json")
    print(f"look at it: realign view {visible(str(out))}")
    return 0


def _verdict(replayed: ReplayedStep, recorded: dict[str, object] | None, tolerance: float) -> str:
    """Return whether the metrics are those that the run recorded, up to a relative tolerance."""
    if recorded is None:
        return "recomputed; the run has no record of it"
    shared = sum(name in recorded and not _of_machine(name) for name in replayed.metrics)
    wrong = _find_differing(replayed, recorded, tolerance)
    if not wrong:
        within = f" up to {tolerance:g}" if tolerance else ""
        return f"recomputed, {shared} metrics equal to the recorded ones{within}"
    name = wrong[0]
    return (
        f"recomputed, but {len(wrong)} of {shared} metrics differ from the recorded ones: {name} is "
        f"{replayed.metrics[name]}, was {recorded[name]}"
    )


def _find_differing(replayed: ReplayedStep, recorded: Mapping[str, object], tolerance: float) -> list[str]:
    """Return the metrics of training that differ by more than a relative tolerance."""

    def equal(now: float, then: object) -> bool:
        if isinstance(then, int | float):
            return now == then or abs(now - then) <= tolerance * abs(then)
        return not math.isfinite(now)  # null in the record

    now = replayed.metrics
    return [name for name in now if name in recorded and not _of_machine(name) and not equal(now[name], recorded[name])]


def _processes(run: Path) -> str:
    """Return why the numbers of a run that torchrun started differ from those of one process; empty for others."""
    commands = (attempt["command"] for attempt in run_info(run)["attempts"])
    if not any(command and command[0] == "torchrun" for command in commands):
        return ""
    return (
        "Several processes of torchrun ran it, and one process recomputes it: sums round differently. "
        "--tolerance 1e-4 allows for it."
    )


def fork_words(words: Sequence[str]) -> list[str]:
    """Return the command line of `realign fork RUN STEP key=value ...`: it continues a run with other settings.

    Steps up to STEP are those of the run. If the run has no checkpoint at STEP, the steps since the one before it are
    taken again here, with the settings and the recorded calls of the run.
    """
    from realign.time_machine.replay import origin

    if is_one_of_many():
        raise ConfigError(
            "realign fork runs in one process. Under torchrun, set resume=RUN/checkpoints/step_N, output_dir, and "
            "resume_allow=[...] with the changed keys."
        )
    here = Path.cwd()
    flags = [word for word in words if word.startswith("--")]
    overrides = [word for word in words if ("=" in word or word.startswith("~")) and word not in flags]
    run, step = run_and_step("fork", [word for word in words if word not in (*flags, *overrides)])
    if Path.cwd() != here:  # the paths in a config are relative to the folder where the run was started, but not this
        out = re.compile(r"output_dir=([\w./-]+)")
        overrides = [f"output_dir={as_word(here / m[1])}" if (m := out.fullmatch(word)) else word for word in overrides]
    if not any(word.startswith("output_dir=") for word in overrides):
        pairs = [word.partition("=") for word in overrides]
        label = "-".join(f"{key.rpartition('.')[2]}-{value}" for key, _, value in pairs)[:60] or "again"
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in label)
        overrides.append(f"output_dir={as_word(run.with_name(f'{run.name}-fork{step}-{safe}'))}")
    config = str(run / "config.yaml")
    forked = experiment_of(run, *overrides)
    if forked.output_dir.resolve() == run.resolve():
        raise ConfigError(f"output_dir={forked.output_dir}: this is the run itself. Choose another folder.")
    if step > (steps := experiment_of(run).steps):
        raise CheckpointError(f"step {step}: the run has steps 1 to {steps}.")
    if step >= forked.steps:
        raise ConfigError(f"step {step}: the fork would end at step {forked.steps}. Set a larger steps.")
    checkpoint = origin(run, step)
    if step and (checkpoint is None or checkpoint.step < step):
        # from a checkpoint, which checks that a file elsewhere has the same rows
        moved = [word for word in overrides if word.startswith("data.path=")] if checkpoint is not None else []
        checkpoint = _advance(run, forked.output_dir, step, checkpoint, moved)
    return [config, *overrides, *flags, *_resume_words(forked, checkpoint)]


def as_word(path: Path) -> str:
    """Return a path as the value of an override, in quotes if it needs them."""
    return str(path) if re.fullmatch(r"(/[\w.-]+)+", str(path)) else quote_text(str(path))


def _resume_words(experiment: Experiment, checkpoint: Checkpoint | None) -> list[str]:
    """Return the words that continue from a checkpoint with the settings of an experiment."""
    from realign.runtime.resume import training_settings
    from realign.runtime.run_checkpoints import config_of

    if checkpoint is None:
        return []
    # the checkpoint from which a fork started has the settings of its parent
    before = training_settings(checkpoint.read()["config"])
    now = training_settings(config_of(experiment))
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    allow = ",".join(key if re.fullmatch(r"[\w.]+", key) else quote_text(key) for key in keys)
    return [f"resume={as_word(checkpoint.path)}", f"resume_allow=[{allow}]"]


def _advance(run: Path, out: Path, step: int, checkpoint: Checkpoint | None, moved: Sequence[str]) -> Checkpoint:
    """Take the steps from a checkpoint of a run to `step` in the folder `out`, and return the checkpoint there.

    `moved` are overrides that say where files of the run are now.
    """
    from realign.runtime import run as train_run
    from realign.runtime.output_folder import remove_output_folder
    from realign.runtime.run_experiment import open_runtime
    from realign.runtime.run_report import parent_record
    from realign.time_machine.replay import RecordedAnswers, StopAfter, check_settings, last_checkpoint

    first = 1 if checkpoint is None else checkpoint.step + 1
    check_settings(run, first)
    resumed = _resume_words(experiment_of(run, *moved), checkpoint)
    experiment = experiment_of(run, f"output_dir={as_word(out.absolute())}", "records.calls=false", *moved, *resumed)
    if experiment.rollout.ahead:
        raise ConfigError(
            f"{run} has no checkpoint at step {step}, and asynchronous rollout would take other steps again. Fork it "
            f"at step {first - 1}, where it has one."
        )
    again = f"steps {first} to {step}" if first < step else f"step {step}"
    print(f"{visible(str(run))} has no checkpoint at step {step}: taking {again} again")
    is_new = not out.exists()

    def load(experiment: Experiment) -> LocalRuntime:
        runtime = open_runtime(experiment)
        if not experiment.runtime.starts_workers:
            runtime.hook = RecordedAnswers(experiment, run)
        return runtime

    try:
        train_run(experiment, callbacks={"fork": StopAfter(step)}, load=load)
    except BaseException:
        if is_new:  # or the command could not be repeated
            remove_output_folder(out)
        raise
    reached = last_checkpoint(out, step)
    if reached is None or reached.step < step:
        raise CheckpointError(
            f"{out}: no checkpoint at step {step} was written. Set checkpoint.every_steps in the run."
        )
    # the steps before are those of the parent, although the fork took some of them again
    info = json_object(out / "run.json") | {"parent": parent_record(run, step)}
    replace_text(out / "run.json", json.dumps(info, indent=1, ensure_ascii=False) + "\n")
    return reached


def bisect(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `realign bisect A B`: find the first step, key, response and token at which two runs part.

    With --run, `realign bisect RUN --run COMMAND` finds the first step of one run for which a command fails, as git
    does: each step that is tried is recomputed, and the command runs in its folder (`step.json`, `batch.safetensors`).
    """
    if args.run is not None:
        return _bisect_by_command(args, words)
    if len(words) != 2:
        raise ConfigError(f"realign bisect expects two runs, such as runs/a runs/b, found {list(words) or 'none'}")
    first, second = (run_folder(folder) for folder in [Path(word).absolute() for word in words])
    _print_settings(first, second)
    step, name, values = _first_metric(first, second)
    if step is None:
        print(name)
        return 0
    print(f"first step that differs: {step} ({name}: {values[0]} and {values[1]})")
    from realign.time_machine.replay import differences

    # `run_folder` changes to the folder where a run was started, to which its paths are relative
    both = [_replay(run_folder(_run_of_step(run, step)), step) for run in (first, second)]
    parts = differences(both[0], both[1], args.tolerance)
    if not parts:
        print("both steps were recomputed, and agree. The difference did not come from training: look at the logs.")
        return 0
    print("in the order of cause:")
    for part in parts:
        where = f" at {part.where}" if part.where else ""
        size = f" ({part.size})" if part.size else ""
        print(visible(f"  {part.what}{where}: {part.values[0]} and {part.values[1]}{size}"))
    return 0


def _run_of_step(run: Path, step: int) -> Path:
    """Return the run that took a step of a run: of the steps up to a fork, its parent."""
    from realign.runtime.run_report import parent_of

    seen = set[Path]()  # files of runs can name each other as parents
    while (parent := parent_of(run)) is not None and step <= parent[1] and run not in seen:
        seen.add(run)
        run = parent[0]
    return run


def _print_settings(first: Path, second: Path) -> None:
    """Print the settings that differ, except those that only name a run."""
    a, b = (flat_config(run / "config.yaml") for run in (first, second))
    keys = [key for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key) and not is_free(key)]
    for key in keys:
        print(visible(f"setting {key}: {a.get(key, '(none)')} and {b.get(key, '(none)')}"))
    if not keys:
        print("no setting of training differs")


def _first_metric(first: Path, second: Path) -> tuple[int | None, str, tuple[object, object]]:
    """Return the first step whose metrics differ, with a metric; None and what was compared if none does."""
    a, b = (
        {step: line for line in json_lines(run / "metrics.jsonl") if isinstance(step := line.get("step"), int)}
        for run in (first, second)
    )
    shared = sorted(step for step in a.keys() & b.keys() if step > 0)
    if not shared:
        raise ConfigError(f"{first} and {second} have no step in common")
    for step in shared:
        for name in a[step].keys() & b[step].keys():
            if not _of_machine(name) and not name.startswith("eval") and a[step][name] != b[step][name]:
                return step, name, (a[step][name], b[step][name])
    text = f"the metrics of all {len(shared)} common steps are equal"
    last, longer = (max(a), second) if max(b) > max(a) else (max(b), first)
    if max(a) != max(b):
        text += f". {longer.name} goes on after step {last}, to step {max(*a, *b)}"
    return None, text, (None, None)


def _of_machine(name: str) -> bool:
    return name in ("seconds", "settings") or name.endswith("_s") or name.startswith(MACHINE)


def _bisect_by_command(args: argparse.Namespace, words: Sequence[str]) -> int:
    from realign.runtime.run_report import parent_of
    from realign.time_machine.replay import replay_folder, write

    if len(words) != 1:
        raise ConfigError(f"realign bisect --run expects one run, found {list(words) or 'none'}")
    if not args.run.strip():
        raise ConfigError(f"--run {args.run!r}: expected a command, such as 'python check_step.py'")
    run = run_folder(Path(words[0]))
    steps = [line["step"] for line in json_lines(run / "metrics.jsonl") if isinstance(line.get("step"), int)]
    parent = parent_of(run)
    # The start counts as good, and the step after the last one as bad, until a step tells otherwise.
    good, bad = 0 if parent is None else parent[1], max(steps, default=0) + 1
    while bad - good > 1:
        step = (good + bad) // 2
        out = replay_folder(run, step)
        write(_replay(run, step), run, out)
        failed = subprocess.run(args.run, shell=True, cwd=out, check=False).returncode != 0
        print(f"step {step}: {'bad' if failed else 'good'}", flush=True)
        good, bad = (good, step) if failed else (step, bad)
    print(f"first bad step: {bad}" if bad <= max(steps, default=0) else "the command fails for no step")
    return 0


def _replay(run: Path, step: int, break_in: str | None = None, *, rescore: bool = False) -> ReplayedStep:
    """Recompute a step of a run, with a status line."""
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from realign.time_machine.replay import replay as recompute

    disable_progress_bar()
    role = break_in.removeprefix("interfaces.") if break_in else None
    experiment = experiment_of(run)
    if role is not None:  # the debugger needs the terminal
        return recompute(experiment, run, step, role, rescore=rescore)
    with Console(stderr=True).status(f"recomputing step {step} of {run}"):
        return recompute(experiment, run, step, rescore=rescore)


__all__ = ["as_word", "bisect", "fork_words", "replay"]
