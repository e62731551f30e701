"""Synchronous and asynchronous rollout with a slow reward."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import Job
from benchmarks.report import table
from benchmarks.scale.task import ON_RAY, common

PROMPTS, GROUP, WORKERS, BOUND = 8, 4, 48, 2
LAST = 4
"""Number of last steps whose mean reward is the final reward."""


def rollout_words(task: Path, steps: int, seed: int, reward: str = "slow") -> list[str]:
    """Return overrides for decoupled PPO, which corrects for stale samples."""
    return [
        *common(task, steps, reward),
        f"seed={seed}",
        f"models.actor.path={task / 'model'}",
        "models.actor.optimizer={lr: 3e-3, schedule: {kind: constant}}",
        f"batch_prompts={PROMPTS}",
        f"interfaces.actor.generation.n={GROUP}",
        "graph._target_=realign.interfaces.decoupled_ppo.dataflow",
        "interfaces.actor._target_=realign.interfaces.decoupled_ppo.DecoupledPPOActorInterface",
        "interfaces.actor.adv_norm={mean: group, std: group}",
        f"interfaces.reward.workers={WORKERS}",
    ]


def ahead(bound: int) -> list[str]:
    """Return overrides for asynchronous rollout."""
    return ["rollout=async", f"rollout.max_staleness={bound}"]


def rollouts(folder: Path, task: Path, words: Mapping[str, str]) -> dict[str, Any]:
    """Compare throughput and final reward of both kinds of rollout."""
    steps, seeds = int(words["rollout_steps"]), int(words["seeds"])
    kinds = {
        "synchronous": ([], None, range(seeds)),
        f"asynchronous, staleness {BOUND}": (ahead(BOUND), BOUND, range(seeds)),
        f"asynchronous, staleness {BOUND}, Ray": ([*ahead(BOUND), *ON_RAY], BOUND, range(1)),
    }
    rows: dict[str, dict[str, Any]] = {}
    for number, (name, (more, bound, of)) in enumerate(kinds.items()):
        jobs = [Job(folder / f"rollout_{number}_{s}", [*rollout_words(task, steps, s), *more]).run() for s in of]
        rows[name] = measured_rollout(jobs, bound)
    base = rows["synchronous"]
    head = ("rollouts", "s/step", "responses/s", "speedup", "reward", "per seed", "staleness")
    lines = []
    for name, r in rows.items():
        each = " ".join(f"{x:.3f}" for x in r["rewards"])
        cells = (f"{r['step_s']:.2f}", f"{r['responses_per_s']:.1f}")
        brings = f"{base['step_s'] / r['step_s']:.2f}x"
        lines.append((name, *cells, brings, f"{r['reward']:.3f}", each, f"{r['staleness']:.2f}"))
    print(table(head, lines))
    fast = rows[f"asynchronous, staleness {BOUND}"]
    same_reward = same(base["rewards"], fast["rewards"])
    return {
        "good": same_reward is not False,
        "brings": round(base["step_s"] / fast["step_s"], 2),
        "same_reward": same_reward,
        "rows": rows,
    }


def measured_rollout(jobs: Sequence[Job], bound: int | None) -> dict[str, Any]:
    """Return means over seeds, for the steps with a full pipeline."""
    seconds = []
    for job in jobs:
        ends = job.series("seconds")
        # the pipeline fills in the first `bound` steps, and empties in the last ones, which admit no prompt
        first = min(bound or 0, len(ends) - 2)
        last = max(first + 1, len(ends) - 1 - (bound or 0))
        seconds.append((ends[last] - ends[first]) / (last - first))
    step_s = statistics.fmean(seconds)
    final = [statistics.fmean(job.series("reward")[-LAST:]) for job in jobs]
    behind = [statistics.fmean(job.series("staleness_head")) for job in jobs]
    return {
        "step_s": round(step_s, 3),
        "responses_per_s": round(PROMPTS * GROUP / step_s, 2),
        "rewards": [round(x, 4) for x in final],
        "reward": round(statistics.fmean(final), 4),
        "staleness": round(statistics.fmean(behind), 3),
    }


def same(one: Sequence[float], other: Sequence[float]) -> bool | None:
    """Return whether two means differ by less than two standard errors of their difference; None with one seed."""
    if len(one) < 2 or len(other) < 2:
        return None
    error = math.sqrt(statistics.variance(one) / len(one) + statistics.variance(other) / len(other))
    return abs(statistics.fmean(one) - statistics.fmean(other)) <= 2 * error + 0.01
