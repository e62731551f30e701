"""The same experiment in several runtimes: weights, throughput and RPC overhead."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import TORCHRUN, Job
from benchmarks.report import table
from benchmarks.scale.task import ON_RAY, common

PROMPTS, GROUP = 16, 8
DIMENSIONS = ("replicate", "context", "tensor", "pipeline")
"""Dimensions of the mesh, besides that of the weights' shards."""
LIMIT = 2e-4
"""Largest difference of final weights that rounding explains. Adam divides by gradients that may be close to 0."""


def runtime_words(task: Path, steps: int) -> list[str]:
    """Return overrides for GRPO with a reference model, a second role that can run in a separate process."""
    return [
        *common(task, steps, "at_once"),
        f"models.actor.path={task / 'larger'}",
        "models.actor.optimizer.lr=1e-3",
        f"batch_prompts={PROMPTS}",
        f"interfaces.actor.generation.n={GROUP}",
        "interfaces.actor.kl.place=loss",
        "interfaces.reward.workers=0",
    ]


def runtime_jobs(folder: Path, words: Sequence[str]) -> dict[str, Job]:
    """Return one job per runtime, all with the same experiment."""
    return {
        "one process": Job(folder / "local", words),
        "torchrun, 2 FSDP ranks": Job(folder / "torchrun", words, TORCHRUN),
        **{
            f"torchrun, {name}=2": Job(folder / name, [*words, f"models.actor.sharding.{name}=2"], TORCHRUN)
            for name in DIMENSIONS
        },
        "Ray, actor | reference": Job(folder / "ray", [*words, *ON_RAY]),
        "Ray, actor on 2 ranks": Job(folder / "ray2", [*words, "runtime=ray", "runtime.placement.actor.devices=2"]),
    }


def runtimes(folder: Path, task: Path, words: Mapping[str, str]) -> dict[str, Any]:
    """Compare weights, throughput and RPC overhead of the runtimes."""
    jobs = runtime_jobs(folder, runtime_words(task, int(words["steps"])))
    base = jobs["one process"].run()
    rows = {name: measured_runtime(job if job is base else job.run(), base) for name, job in jobs.items()}
    head = ("runtime", "s/step", "responses/s", "x one process", "RPC, ms", "calls", "largest weight difference")
    print(
        table(
            head,
            [
                (
                    name,
                    f"{r['step_s']:.3f}",
                    f"{r['responses_per_s']:.0f}",
                    f"{rows['one process']['step_s'] / r['step_s']:.2f}",
                    f"{1000 * r['hop_s']:.1f}" if r["calls"] else "-",
                    str(r["calls"]) if r["calls"] else "-",
                    f"{r['difference']:.1e}" if r["difference"] else "0",
                )
                for name, r in rows.items()
            ],
        )
    )
    one_rank = rows["Ray, actor | reference"]
    good = one_rank["difference"] == 0 and all(row["difference"] <= LIMIT for row in rows.values())
    return {"good": good, "rows": rows}


def measured_runtime(job: Job, base: Job) -> dict[str, Any]:
    """Return medians over the steps after the first two."""
    rows = job.records()[2:]
    step_s = statistics.median(row["step_s"] for row in rows)
    hops = [[value for name, value in row.items() if name.endswith("_wait_s")] for row in rows]
    return {
        "step_s": round(step_s, 4),
        "responses_per_s": round(PROMPTS * GROUP / step_s, 1),
        "hop_s": round(statistics.median(statistics.fmean(h) for h in hops), 5) if hops[0] else 0.0,
        "calls": len(hops[0]),
        "difference": job.largest_difference(base),
    }
