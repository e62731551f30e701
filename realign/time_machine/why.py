"""`realign why RUN`: what keeps a run from learning, by its records, or with --test by forks that change one thing.

All forks take the same prompts with the same random numbers, so a difference comes from the change.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from realign.config.errors import ConfigError
from realign.config.words import snake_case
from realign.errors import CheckpointError, ExitCode
from realign.own_files import OwnFiles, make_folder, replace_bytes
from realign.records.diagnosis import (
    RunRecords,
    Symptom,
    diagnose,
    diagnosis_lines,
    records_of,
    seeds_disagree,
)
from realign.records.evidence import GENERATION
from realign.records.record_files import METRICS, json_lines, json_object, yaml_object
from realign.report.data import status
from realign.report.files import check_run, flat_config, run_info, summary
from realign.settings import Count, NonNegativeInt
from realign.text import shorten, visible
from realign.time_machine.commands import as_word
from realign.time_machine.earlier_run import experiment_of, run_folder

UNCHANGED, CONTROL, RESPONSES = "unchanged", "shuffled rewards (control)", "4 x responses"
MOST_CHANGED = 8
"""Number of changed settings that are shown."""
_ENDED = {"failed": "failed", "stopped": "was stopped", "interrupted": "was interrupted", "killed": "was killed"}
SURE = 2.58
"""Standard errors on either side of a mean: an interval of 99%, since about ten changes are compared."""


@dataclass
class WhyOptions:
    """How `realign why --test` forks a run."""

    step: NonNegativeInt = 0
    """Fork after this step, which has a checkpoint; 0 is the start."""
    steps: Count = 10
    """Steps of each fork."""


class Moved(NamedTuple):
    """By how much a change moved a metric: the mean difference, and half of its interval."""

    by: float
    within: float

    def __str__(self) -> str:
        if self.by == self.within == 0:
            return "same"
        known = math.isfinite(self.within)
        return f"{self.by:+.3f}" + f" ({self.by - self.within:+.3f} to {self.by + self.within:+.3f})" * known


def why(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `realign why RUN`. FILE.py:NAME are symptoms of the user, and key=value are changes for --test."""
    from realign.cli.arguments import split_options
    from realign.rewards.pool.functions import load_object

    options, words = split_options("why", WhyOptions, words)
    changes = [word for word in words if "=" in word]
    symptoms = [word for word in words if ":" in word and word not in changes]
    folders = [word for word in words if word not in (*symptoms, *changes)]
    if not folders or (args.test and len(folders) > 1):
        raise ConfigError(f"realign why expects one run, such as runs/NAME, found {folders or 'none'}")
    if (changes or args.yes) and not args.test:
        raise ConfigError(f"{(*changes, '--yes')[0]} belongs to realign why RUN --test, which tests changes.")
    for folder in folders:
        check_run(Path(folder))
    if args.test:
        return _test(run_folder(Path(folders[0])), options, changes, yes=args.yes)
    # a class is a symptom with settings
    further = [x() if isinstance(x, type) else x for x in (load_object(w, "symptom", "FILE.py:NAME") for w in symptoms)]
    if len(folders) > 1:
        return _compare_seeds(folders, further)
    print(*why_lines(Path(folders[0]), further), sep="\n")
    return 0


def why_lines(folder: Path, further: Sequence[Symptom] = ()) -> list[str]:
    """Return what `realign why RUN` prints: what the run suffers from, why it ended early, and what it changed."""
    run = records_of(folder)
    diagnosis = diagnose(run, further)
    parts = [_end_lines(folder, run.last), diagnosis_lines(folder, diagnosis)]
    # what keeps it from learning is asked for, and not that it ended
    parts = parts[::-1] if diagnosis.causes else parts
    parts += [] if diagnosis.healthy else [_changed_lines(folder, run)]
    return [line for part in filter(None, parts) for line in ("", *part)][1:]


def _end_lines(folder: Path, last: int) -> list[str]:
    """Return why a run ended before its last step, and a command to go on; nothing for another run."""
    info, end = run_info(folder), summary(folder)
    state, reason = status(folder, info, end).values()
    if state not in _ENDED:
        return []
    words = ["realign", str(folder / "config.yaml")]
    key = reason.partition(":")[0]  # of the callback, see `Stop.describe`
    words += [f"{key}=null"] * (state == "stopped" and re.fullmatch(r"[\w.]+", key) is not None)
    going_on = ["overwrite=false", "resume=auto", f"output_dir={folder}"]
    words += going_on if any(folder.glob("checkpoints/step_*")) else [f"output_dir={folder}-again"]
    after = f"{_ENDED[state]} after {last:,} of {info['steps'] or end['steps'] or last:,} steps"
    why = f": {shorten(reason, 500).removesuffix('.')}" if reason else ""
    return [visible(f"The run {after}{why}."), "To go on:", f"   {shlex.join(words)}"]


def _changed_lines(folder: Path, run: RunRecords) -> list[str]:
    """Return the settings of a run that differ from the defaults, and can change learning."""
    from realign.config.help import changed_settings

    attempts, found = run_info(folder)["attempts"], list[str]()
    with suppress(Exception):  # a config may come from a stranger, and a value be of any kind
        found = changed_settings(run.config, (attempts[-1]["command"] if attempts else None) or ())
    count = f", {MOST_CHANGED} of {len(found)}" if len(found) > MOST_CHANGED else ""
    shown = [visible(f"   {shorten(text, 200)}") for text in found[:MOST_CHANGED]]
    return [f"Settings that differ from the defaults{count}:", *shown] if shown else []


def _compare_seeds(folders: Sequence[str], further: Sequence[Symptom]) -> int:
    """Print whether runs that differ only in their seeds agree, and a sentence about each.

    Raises:
        ConfigError: they differ in another setting.
    """
    from realign.report.compare import seed_groups  # imports torch

    if len(seed_groups([flat_config(Path(folder) / "config.yaml") for folder in folders])) > 1:
        raise ConfigError("realign why compares runs that differ only in their seeds. See realign compare for others.")
    runs = {folder: records_of(Path(folder)) for folder in folders}
    cause = seeds_disagree(runs)
    print("Seeds agree." if cause is None else visible(f"{cause.sentence} {cause.advice}"))
    print(*(visible(f"  {folder}: {diagnose(run, further).sentence}") for folder, run in runs.items()), sep="\n")
    return 0


# --- what to change ---


def candidates(run: RunRecords, actor: Any, optimizer: Any) -> dict[str, list[str]]:
    """Return the changes that apply to a run, each as overrides, by name.

    Args:
        run: records of the run.
        actor: its algorithm. Each of its components that isn't the default is tested alone.
        optimizer: settings of its optimizer; None if it has none.
    """
    of_actor, of_optimizer = "interfaces.actor", "models.actor.optimizer"
    rate = run.setting(f"{of_optimizer}.lr") or max(run.values("lr"), default=0.0)
    n, limit, temperature = (run.setting(f"{GENERATION}.{key}", 0) for key in ("n", "max_new_tokens", "temperature"))
    gaps = (max(run.values(f"{name}_logprob_diff_max"), default=0.0) for name in ("first", "behavior"))
    found = {
        "learning rate x 10": f"{of_optimizer}.lr={10 * rate:.4g}" if rate else "",
        "learning rate / 10": f"{of_optimizer}.lr={rate / 10:.4g}" if rate else "",
        "no KL": f"{of_actor}.kl.place=none" if run.setting(f"{of_actor}.kl.place", "none") != "none" else "",
        RESPONSES: f"{GENERATION}.n={4 * n}" if n else "",
        "2 x answer length": f"{GENERATION}.max_new_tokens={2 * limit}" if run.cut > 0.05 else "",
        "temperature 1": f"{GENERATION}.temperature=1" if temperature not in (0, 1) else "",
        "chat template": "data.template=chat" if run.setting("data.template") == "plain" else "",
        "corrected sampler": f"{of_actor}.correction=importance_correction" if max(gaps) > 0.01 else "",
        CONTROL: "interfaces.reward.shuffle=true" if run.setting("interfaces.reward.shuffle") is False else "",
    }
    changes = {name: [word] for name, word in found.items() if word}
    for role, part in ((of_actor, actor), (of_optimizer, optimizer)):
        for f in fields(part) if part else ():
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            if (key := f"{role}.{f.name}") not in (GENERATION, f"{of_actor}.kl"):
                changes[f"default {f.name}"] = resets(key, getattr(part, f.name), default)
    return changes


def resets(key: str, value: Any, default: Any) -> list[str]:
    """Return the overrides that give a setting, or a component, its default; none if it has it."""
    if value == default or default is MISSING:
        return []
    if is_dataclass(default) and type(value) is type(default):
        pairs = ((f"{key}.{f.name}", getattr(value, f.name), getattr(default, f.name)) for f in fields(value))
        return [word for pair in pairs for word in resets(*pair)]
    if is_dataclass(default):
        return [f"{key}={snake_case(type(default).__name__)}"]
    plain = default.value if isinstance(default, Enum) else default
    return [f"{key}={json.dumps(plain)}"] if plain is None or isinstance(plain, bool | int | float | str) else []


# --- the forks ---


def _test(run: Path, options: WhyOptions, words: Sequence[str], *, yes: bool) -> int:
    """Fork a run once per change, unless that was done before, and print what each change moves."""
    from realign.records.checkpoint.folder import CHECKPOINTS
    from realign.runtime.run_report import duration

    records = records_of(run)
    changes = _applicable(run, records, words)
    if options.step and not (run / CHECKPOINTS / f"step_{options.step:06d}").is_dir():
        there = [path.name for path in sorted((run / CHECKPOINTS).glob("step_*"))]
        raise CheckpointError(f"why.step={options.step}: the run has no checkpoint there, only {there or 'none'}.")
    # with the id of the run: another one in its folder has other forks
    run_id = str(json_object(run / "run.json").get("id"))[:6]
    root = run.with_name(f"{run.name}-why") / f"{run_id}-step{options.step}-{options.steps}"
    forks = {name: root / _label(changes[name]) for name in changes}
    left = [name for name, folder in forks.items() if json_object(folder / "summary.json").get("status") != "completed"]
    print(f"{len(changes)} forks of {visible(str(run))} for {options.steps} steps from step {options.step}:")
    width = max(map(len, changes)) + 2
    for name, change in changes.items():
        shown = " ".join(word for word in change if word != name)
        print(visible(f"  {name:<{width}}{shown}{'' if name in left else ' (done)'}".rstrip()))
    if left:
        step = median(records.values("step_s") or [0.0])
        seconds = sum(step * options.steps * (4 if name == RESPONSES else 1) for name in left)
        print(f"About {duration(seconds)} for {len(left)} of them, plus evaluations and the start of each.")
    if left and not yes:
        print("Add --yes to run them. They get folders of their own, and the run stays as it is.")
        return 0
    for name in left:
        code = _fork(run, options, changes[name], forks[name], name)
        if code >= ExitCode.interrupted or (code and name == UNCHANGED):
            print("The same command goes on.")
            return code
    print("", *effects(forks, options.step + options.steps), sep="\n")
    return 0


def _applicable(run: Path, records: RunRecords, words: Sequence[str]) -> dict[str, list[str]]:
    """Return the changes to test, the unchanged run first: those that the user names, else all that this run can take.

    Raises:
        ConfigError: the run can't take a change of the user.
    """
    experiment = experiment_of(run)
    if words:
        for word in words:
            experiment_of(run, word)
        return {UNCHANGED: [], **{word: [word] for word in words}}
    actor, model = (part.get("actor") for part in (experiment.interfaces, experiment.models))
    if actor is None:
        raise ConfigError(f"{run}: no role is called actor. Name the changes to test: key=value.")
    found: dict[str, list[str]] = {UNCHANGED: []}
    for name, change in candidates(records, actor, getattr(model, "optimizer", None)).items():
        with suppress(ConfigError):  # another setting excludes it
            if change:
                experiment_of(run, *change)
                found[name] = change
    return found


def _label(change: Sequence[str]) -> str:
    """Return the name of the folder of a fork."""
    text = "-".join(word.partition("=")[0].rpartition(".")[2] + "-" + word.partition("=")[2] for word in change)
    return re.sub(r"[^\w.-]", "_", text)[:60] or UNCHANGED


def _fork(run: Path, options: WhyOptions, change: Sequence[str], out: Path, name: str) -> int:
    """Fork a run in a process of its own, whose output goes to a log, and return its exit code."""
    from realign.runtime.output_folder import remove_output_folder

    steps = options.step + options.steps
    config = yaml_object(run / "config.yaml")
    settings = [f"output_dir={as_word(out)}", f"steps={steps}", f"sample_prompts={config.get('batch_prompts', 1)}"]
    settings += ["save_every_steps=null", "save_best=null", "checkpoint=null"]
    settings += [f"{part}.{name}=null" for part in ("trackers", "callbacks") for name in config.get(part) or ()]
    settings += ["records.calls=false", "records.system_seconds=null", "overwrite=false", "resume=null"]
    settings += [f"evaluation.every_steps={steps}"] * bool(config.get("evaluation"))
    remove_output_folder(out)  # of a fork that was stopped
    make_folder(out.parent)
    log = out.with_name(f"{out.name}.log")
    print(f"{name} ... ", end="", flush=True)
    command = [sys.executable, "-m", "realign", "fork", str(run), str(options.step), *change, *settings]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    replace_bytes(log, done.stdout)
    OwnFiles(out).remove("final")  # ten copies of a model are many
    why = done.stdout.decode(errors="replace").strip().rpartition("\n")[2]
    print("done" if done.returncode == 0 else visible(f"failed: {shorten(why, 200)} ({log})"))
    return done.returncode


# --- what they show ---


def effects(forks: Mapping[str, Path], last: int) -> list[str]:
    """Return what each change moves: a sentence, then a line per fork.

    The reward is that of the second half of the steps, by prompt; the held-out reward that of the last evaluation.

    Args:
        forks: folder of each fork by name, the unchanged one first.
        last: step at which they end.
    """
    done = {name: _measure(folder, last) for name, folder in forks.items() if (folder / "summary.json").is_file()}
    base = done[UNCHANGED]
    signs = {name: sign for name, (sign, _) in base.items()}
    moved = {
        name: {metric: _difference(values[metric][1], base[metric][1]) for metric in signs if metric in values}
        for name, values in done.items()
        if name != UNCHANGED
    }
    width = max(map(len, forks)) + 2
    lines = [f"{'':<{width}}" + "".join(f"{metric:<28}" for metric in signs)]
    lines += [f"{UNCHANGED:<{width}}" + "".join(f"{fmean(values.values()):<28.3f}" for _, values in base.values())]
    lines += [f"{n:<{width}}" + "".join(f"{by.get(m, '-')!s:<28}" for m in signs) for n, by in moved.items()]
    lines += [f"{name:<{width}}failed" for name in forks if name not in done]
    explained = "Differences from the unchanged fork, with 99% intervals over prompts or steps; one seed."
    return [_verdict(moved, signs), "", *(visible(line.rstrip()) for line in lines), "", explained]


def _verdict(moved: Mapping[str, Mapping[str, Moved]], signs: Mapping[str, int]) -> str:
    """Return which change helps most, by the last metric that it moves for certain."""
    for metric in reversed([*signs]):
        sure = {
            name: signs[metric] * by[metric].by - by[metric].within
            for name, by in moved.items()
            if name != CONTROL and metric in by
        }
        best = max(sure, key=sure.__getitem__, default="")
        if best and sure[best] > 0:
            return f"{best} helps most: {metric} moves by {moved[best][metric]}."
    return "No change helps for certain in these few steps."


def _measure(folder: Path, last: int) -> dict[str, tuple[int, dict[Any, float]]]:
    """Return values of training and held-out data that pair with those of another fork, with the good direction."""
    run = RunRecords(json_lines(folder / METRICS))
    recent = [record for record in run.steps if record["step"] > last - (len(run.steps) + 1) // 2]
    values = _by_prompt(json_lines(folder / "samples.jsonl"), recent[0]["step"] if recent else 0)
    name, sign = run.goal
    found = {name: (sign, values if name == "reward" and values else {r["step"]: r[name] for r in recent if name in r})}
    held_out, sign = run.held_out
    values = _by_prompt(json_lines(folder / "eval_samples.jsonl"), last)
    whole = {last: run.evaluated[-1]} if run.evaluated else {}
    found[held_out] = (sign, values if held_out.endswith("reward") and values else whole)
    return {name: measured for name, measured in found.items() if measured[1]}


def _by_prompt(samples: Sequence[Mapping[str, Any]], first: int) -> dict[Any, float]:
    """Return the mean reward of each prompt in each step from `first` on."""
    rewards = defaultdict(list)
    for sample in samples:
        if (sample.get("step") or 0) >= first and isinstance(sample.get("reward"), int | float):
            rewards[sample["step"], sample.get("evaluation"), sample.get("id")].append(sample["reward"])
    return {key: fmean(values) for key, values in rewards.items()}


def _difference(values: Mapping[Any, float], base: Mapping[Any, float]) -> Moved:
    """Return the mean difference of paired values."""
    differences = [values[key] - base[key] for key in values.keys() & base.keys()]
    n = len(differences)
    if not n:
        return Moved(math.nan, math.inf)
    return Moved(fmean(differences), SURE * stdev(differences) / math.sqrt(n) if n > 1 else math.inf)


__all__ = ["WhyOptions", "candidates", "effects", "resets", "why", "why_lines"]
