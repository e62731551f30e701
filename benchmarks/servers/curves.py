"""Parts `curves` and `language`: GRPO with vLLM and with the in-process sampler, with the same seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import Job
from benchmarks.report import table
from benchmarks.servers.task import prepared, sampling
from realign.demo import arithmetic, reasoning
from realign.demo.smollm2 import smollm2
from realign.samplers.servers.vllm import Vllm

LIMIT_S = 3600
"""Seconds that a run may take."""
LAST = 10
"""Number of last steps whose mean reward is the final reward."""


def curves(folder: Path, words: Mapping[str, str]) -> dict[str, Any]:
    """Train the demo's additions with both samplers."""
    task = prepared(folder)
    results: dict[str, list[Job]] = {"in process": [], "vLLM": []}
    for seed in range(int(words["seeds"])):
        sft = _sft(folder, task, seed)
        for name, more in _samplers(sampling(words, 64)).items():
            run = [
                "experiment=grpo_arithmetic",
                f"steps={words['steps']}",
                f"seed={seed}",
                *_task(sft.folder / "final" / "actor", task.prompts, task.held_out),
                *more,
            ]
            results[name].append(Job(folder / f"{name.replace(' ', '_')}_{seed}", run).run(LIMIT_S))
    return compared(results)


def _task(model: object, data: object, held_out: object) -> list[str]:
    """Return the overrides of a model and its data."""
    return [f"models.actor.path={model}", f"data.path={data}", f"evaluation.data.path={held_out}"]


def _sft(folder: Path, task: arithmetic.Task, seed: int) -> Job:
    """Train the model that both samplers start from."""
    words = _task(task.model, task.demonstrations, task.held_out)
    return Job(folder / f"sft_{seed}", ["experiment=sft_arithmetic", f"seed={seed}", *words]).run()


def language(folder: Path, words: Mapping[str, str]) -> dict[str, Any]:
    """Train the language model of `make llm` with both samplers."""
    task = reasoning.prepare(folder / "reasoning", seed=0)
    results = {}
    for name, more in _samplers(sampling(words, 256)).items():
        run = [
            "experiment=grpo_reasoning",
            f"steps={words['language_steps']}",
            *_task(smollm2(), task.train, task.held_out),
            *more,
        ]
        results[name] = [Job(folder / f"language_{name.replace(' ', '_')}", run).run(LIMIT_S)]
    return compared(results)


def _samplers(spec: Vllm) -> dict[str, Sequence[str]]:
    """Return the overrides of each sampler. Both runs correct for the difference of sampler and trainer."""
    server = [
        "models.actor.sampler=vllm",
        f"models.actor.sampler.untie={str(spec.untie).lower()}",
        f'models.actor.sampler.arguments="{spec.arguments}"',
    ]
    server += [
        f"models.actor.sampler.{name}={value}" for name in ("python", "launch") if (value := getattr(spec, name))
    ]
    server += [f"models.actor.sampler.environment.{name}='{value}'" for name, value in spec.environment.items()]
    return {"in process": ["interfaces.actor.correction=importance_correction"], "vLLM": server}


def compared(results: Mapping[str, Sequence[Job]]) -> dict[str, Any]:
    """Print the rewards of both samplers, and return their difference in standard errors."""
    final = {name: [statistics.fmean(job.series("reward")[-LAST:]) for job in jobs] for name, jobs in results.items()}
    gaps = {name: max(max(job.series("behavior_logprob_diff_max")) for job in jobs) for name, jobs in results.items()}
    held_out = {name: [job.series("eval/reward")[-1] for job in jobs] for name, jobs in results.items()}
    step_s = {name: statistics.median(job.series("step_s")[-1] for job in jobs) for name, jobs in results.items()}
    rows = [
        [
            name,
            ", ".join(f"{value:.3f}" for value in final[name]),
            ", ".join(f"{value:.3f}" for value in held_out[name]),
            f"{gaps[name]:.1e}",
            f"{step_s[name]:.2f}",
        ]
        for name in results
    ]
    print(table(["sampler", f"reward of the last {LAST} steps", "held out", "largest log-prob gap", "s/step"], rows))
    one, other = final.values()
    difference = statistics.fmean(other) - statistics.fmean(one)
    errors = None
    if len(one) > 1:
        errors = difference / max(1e-9, math.sqrt((statistics.variance(one) + statistics.variance(other)) / len(one)))
        print(f"difference {difference:+.4f}, {errors:+.1f} standard errors")
    curves = {name: [job.series("reward") for job in jobs] for name, jobs in results.items()}
    good = errors is None or abs(errors) <= 2
    return {
        "good": good,
        "final": final,
        "held_out": held_out,
        "gaps": gaps,
        "standard_errors": errors,
        "step_s": step_s,
        "curves": curves,
    }
