"""Synchronous and asynchronous rollout with a slow reward, compared with each other and with the simulator."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.costs import measure
from benchmarks.jobs import Job
from benchmarks.report import table
from benchmarks.scale.task import ON_RAY, REWARD, SIGMA, TOKENS, common
from realign_planner.simulator import Costs, Report, RuntimeSchedule, Tail, Work, full_steps, simulate

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
    """Compare throughput and final reward of both kinds of rollout, and throughput with the simulator."""
    steps, seeds = int(words["rollout_steps"]), int(words["seeds"])
    kinds = {
        "synchronous": ([], None, range(seeds)),
        f"asynchronous, staleness {BOUND}": (ahead(BOUND), BOUND, range(seeds)),
        f"asynchronous, staleness {BOUND}, Ray": ([*ahead(BOUND), *ON_RAY], BOUND, range(1)),
    }
    costs = measure([*rollout_words(task, steps, 0, "at_once"), "checkpoint=null"], PROMPTS, TOKENS)
    rows: dict[str, dict[str, Any]] = {}
    for number, (name, (more, bound, of)) in enumerate(kinds.items()):
        jobs = [Job(folder / f"rollout_{number}_{s}", [*rollout_words(task, steps, s), *more]).run() for s in of]
        expected = [predicted(costs, job, bound, steps) for job in jobs]
        rows[name] = measured_rollout(jobs, bound) | {
            "predicted_s": round(statistics.fmean(r.step_s for r in expected), 3),
            "predicted_staleness": round(statistics.fmean(r.staleness()["head"] for r in expected), 2),
        }
    base = rows["synchronous"]
    head = ("rollouts", "s/step", "predicted", "responses/s", "speedup", "reward", "per seed", "staleness")
    lines = []
    for name, r in rows.items():
        r["error"] = round(r["predicted_s"] / r["step_s"] - 1, 3)
        each = " ".join(f"{x:.3f}" for x in r["rewards"])
        cells = (f"{r['step_s']:.2f}", f"{r['predicted_s']:.2f} ({r['error']:+.0%})", f"{r['responses_per_s']:.1f}")
        brings = f"{base['step_s'] / r['step_s']:.2f}x"
        lines.append((name, *cells, brings, f"{r['reward']:.3f}", each, f"{r['staleness']:.2f}"))
    print(table(head, lines))
    fast = rows[f"asynchronous, staleness {BOUND}"]
    return {
        "good": all(abs(r["error"]) <= 0.15 for r in rows.values()),
        "brings": round(base["step_s"] / fast["step_s"], 2),
        "same_reward": same(base["rewards"], fast["rewards"]),
        "costs": asdict(costs),
        "rows": rows,
    }


def measured_rollout(jobs: Sequence[Job], bound: int | None) -> dict[str, Any]:
    """Return means over seeds, for the steps with a full pipeline."""
    seconds = []
    for job in jobs:
        ends = job.series("seconds")
        full = full_steps(len(ends), bound)
        seconds.append((ends[full.stop - 1] - ends[full.start - 1]) / (full.stop - full.start))
    step_s = statistics.fmean(seconds)
    final = [statistics.fmean(job.series("reward")[-LAST:]) for job in jobs]
    behind = [statistics.fmean(job.series("staleness_head")) for job in jobs]
    return {
        "step_s": round(step_s, 3),
        "responses_per_s": round(PROMPTS * GROUP / step_s, 2),
        "rewards": [round(x, 4) for x in final],
        "reward": round(statistics.fmean(final), 4),
        "staleness": round(statistics.fmean(behind), 3),
        "curves": [[(row["seconds"], row["reward"]) for row in job.records()] for job in jobs],
    }


def predicted(costs: Costs, job: Job, bound: int | None, steps: int) -> Report:
    """Simulate the prompts of a job in the order in which the run drew them."""
    work = Work(
        batch_prompts=PROMPTS,
        group=GROUP,
        steps=steps,
        prompt_tokens=6,
        lengths=Tail(TOKENS),
        reward_s=reward_seconds(job, steps),
        reward_workers=WORKERS,
    )
    return simulate(costs, work, RuntimeSchedule(bound))


def reward_seconds(job: Job, steps: int) -> tuple[float, ...]:
    """Return the reward seconds of each prompt that a run draws."""
    from realign.config import compose
    from realign.config.experiment import build_experiment
    from realign.runtime import LocalRuntime

    drawn = [word for word in job.words if not word.startswith(("rollout", "runtime"))]
    runtime = LocalRuntime(build_experiment(compose([*drawn, "checkpoint=null"])))
    try:
        batches = [runtime.batch(number) for number in range(1, steps + 1)]
        decode = runtime.models["actor"].tokenizer.decode
        prompts = [decode(ids) for batch in batches for ids in batch.sequences("prompt_ids")]
    finally:
        runtime.close()
    spent: dict[str, Any] = {}
    exec(REWARD.format(sigma=SIGMA, tokens=TOKENS), spent)
    return tuple(spent["seconds"](prompt) for prompt in prompts)


def same(one: Sequence[float], other: Sequence[float]) -> bool | None:
    """Return whether two means differ by less than two standard errors of their difference; None with one seed."""
    if len(one) < 2 or len(other) < 2:
        return None
    error = math.sqrt(statistics.variance(one) / len(one) + statistics.variance(other) / len(other))
    return abs(statistics.fmean(one) - statistics.fmean(other)) <= 2 * error + 0.01
