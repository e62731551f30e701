"""The runs of the study: their overrides, their order, and running one until it ends or time is up."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.real_curves.tasks import TASKS

Record = dict[str, Any]

STEPS = 32
SFT_STEPS = 10
"""So few that the model is not yet at its best, and GRPO has something to add."""
SERIES = ("reward", "entropy", "response_tokens", "zero_std_fraction", "approx_kl", "grad_norm", "step_s")
"""Metrics of each training step that a record contains."""
SFT = "reversal_sft"


@dataclass(frozen=True)
class Run:
    """One run: an algorithm on a task with a seed."""

    task: str
    algorithm: str
    """grpo, rloo, ppo or sft."""
    seed: int = 0
    control: bool = False
    """Whether rewards are shuffled."""
    after_sft: bool = False
    """Whether the run starts from the model of the SFT run of its task."""

    @property
    def group(self) -> str:
        """Name of what the seeds of a run have in common."""
        start = "sft_" if self.after_sft else ""
        return f"{self.task}_{start}{self.algorithm}" + ("_control" if self.control else "")

    @property
    def name(self) -> str:
        """Name of the run and of its folder."""
        return SFT if self.algorithm == "sft" else f"{self.group}_{self.seed}"


def _planned() -> list[Run]:
    """Return all runs, in an order in which the first ones already show something for each task."""
    sums, syllogisms = Run("sums", "grpo"), Run("syllogisms", "grpo")
    reversal = Run("reversal", "grpo", after_sft=True)
    runs = [
        sums,
        Run("sums", "grpo", control=True),
        syllogisms,
        Run("syllogisms", "grpo", control=True),
        Run("reversal", "sft"),
        reversal,
        Run("reversal", "grpo", control=True, after_sft=True),
        Run("reversal", "grpo"),
    ]
    for seed in (1, 2):
        runs += [Run(run.task, run.algorithm, seed, after_sft=run.after_sft) for run in (sums, syllogisms, reversal)]
    runs += [Run("sums", algorithm, seed) for seed in range(3) for algorithm in ("rloo", "ppo")]
    return [*runs, *(Run("reversal", "grpo", seed) for seed in (1, 2))]


RUNS: Mapping[str, Run] = {run.name: run for run in _planned()}


def overrides(run: Run, folder: Path, model: str, *, steps: int = STEPS) -> list[str]:
    """Return the overrides of a run.

    Args:
        run: The run.
        folder: Folder of the study, which contains the files of the tasks and the runs.
        model: Folder of SmolLM2-135M-Instruct.
        steps: Number of steps of GRPO, RLOO and PPO.
    """
    task, files, output = TASKS[run.task], folder / "tasks" / run.task, folder / run.name
    common = [
        f"seed={run.seed}",
        f"output_dir={output}",
        "resume=auto",
        "threads=1",
        "checkpoint.every_minutes=4",
        "checkpoint.keep=1",
        "+models.actor.dtype=bfloat16",
        f"models.actor.optimizer.lr={'5e-5' if run.algorithm == 'sft' else '2e-5'}",
    ]
    if run.algorithm == "sft":
        return [
            "experiment=sft",
            f"models.actor.path={model}",
            f"data.path={files / 'demonstrations.jsonl'}",
            "data.max_tokens=128",
            f"steps={SFT_STEPS}",
            "batch_prompts=16",
            "save_every_steps=null",
            *common,
        ]
    start = folder / SFT / "final" / "actor" if run.after_sft else model
    # The sampler computes in bf16, too: its log-probs differ from the trainer's, and the ratio of GRPO and PPO corrects
    # for it. RLOO has no ratio.
    words = [
        "experiment=grpo_reasoning",
        f"models.actor.path={start}",
        f"data.path={files / 'train.jsonl'}",
        f"evaluation.data.path={files / 'held_out.jsonl'}",
        f"evaluation.every_steps={steps // 2}",
        "evaluation.generation.n=2",
        f"interfaces.actor.generation.max_new_tokens={task.max_new_tokens}",
        f"interfaces.reward.function={task.reward_path}",
        f"interfaces.reward.shuffle={str(run.control).lower()}",
        "interfaces.reward.workers=0",
        f"steps={steps}",
        "ratio_tolerance=1",
        *common,
    ]
    if run.algorithm == "rloo":
        words += ["algorithm=rloo", "interfaces.actor.kl.place=none"]
    if run.algorithm == "ppo":
        words += [
            "interfaces.actor._target_=ppo",
            "+interfaces.actor.critic=own",
            f"+models.critic.path={start}",
            "+models.critic.head={_target_: value, init: zero}",
            "+models.critic.dtype=bfloat16",
            "+models.critic.optimizer={lr: 1e-4, schedule: {kind: constant, warmup: 5}}",
            "+interfaces.critic={_target_: critic, n_minibatches: 1, objective: {clip: null}}",
        ]
    return words


def execute(run: Run, folder: Path, words: Sequence[str], deadline: float) -> Record | None:
    """Run until the end, and return the record; None if `deadline` came first and the run was stopped to be resumed.

    Only the model of the SFT run is kept, since a model and its checkpoint take 2 GB.

    Args:
        run: The run.
        folder: Folder of the study.
        words: Overrides.
        deadline: Time (`time.monotonic`) at which the run is told to write a checkpoint and end.

    Raises:
        RuntimeError: the run failed.
    """
    process = subprocess.Popen([sys.executable, "-m", "realign", *words])
    try:
        code = process.wait(max(deadline - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        return None
    except KeyboardInterrupt:  # the run got the signal, too, and writes a checkpoint
        process.wait()
        raise
    outcome = record(run, folder / run.name)
    # A run whose rewards were all equal made no optimizer step, and realign calls that an error. Here it is a result.
    if code != 0 and not (outcome["reward"] and not any(outcome["grad_norm"])):
        raise RuntimeError(f"{run.name} ended with exit code {code}; see {folder / run.name / 'realign.log'}")
    for name in ("checkpoints", *(() if run.algorithm == "sft" else ("final",))):
        shutil.rmtree(folder / run.name / name, ignore_errors=True)
    return outcome


def record(run: Run, output: Path) -> Record:
    """Return the curves of a run as a JSON object."""
    path = output / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    steps = [line for line in lines if "step_s" in line]
    held_out = {line["step"]: round(line["eval/reward"], 4) for line in lines if "eval/reward" in line}
    return {
        "run": run.name,
        "group": run.group,
        "task": run.task,
        "seed": run.seed,
        "held_out": {str(step): value for step, value in held_out.items()},
        **{name: [float(f"{line[name]:.4g}") for line in steps if name in line] for name in SERIES},
    }
