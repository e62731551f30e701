"""Compare the predictions of `realign plan` with runs on two cores.

    python -m extras.planner.benchmarks.accuracy                 # about 5 minutes on two idle cores, loopback only
    python -m extras.planner.benchmarks.accuracy steps=6 placements=one_process,torchrun folder=runs/plan

The experiment is decoupled PPO with a reference model: a Qwen2 with 3 million weights, 128 responses of 32 tokens per
step. Three runs in one process calibrate the costs, with the whole batch, with a quarter of its prompts, and with
responses of a quarter of the length. The other placements are predicted before they run:

one_process     One process with one thread, rollout=sync. It is also the first calibration run.
copy            One process, rollout=async: a copy of the policy samples on the second core.
torchrun        torchrun with two FSDP ranks, rollout=sync.
reference       Ray, actor and reference in separate processes, rollout=sync.
workers         Ray, actor and reference in one process, rollout=async with one rollout worker.

Prints a table and, as the last line, one JSON object. The exit code is 1 if a prediction deviates by more than
`LIMIT` from the measured seconds of a step.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.jobs import REALIGN, TORCHRUN, Job
from benchmarks.report import arguments, facts, table
from benchmarks.scale.task import common, prepare
from realign_planner.measured import calibrated, read_runs, with_measured_lengths
from realign_planner.options import DeviceKind, PlanOptions
from realign_planner.placements import PlannedGroup, PlannedPlacement, Sampling, launcher, overrides
from realign_planner.predict import Cluster, Prediction, predict
from realign_planner.simulator import full_steps
from realign_planner.workload import Workload, workload_of

PROMPTS, GROUP, LENGTH = 16, 8, 32
LIMIT = 0.25
"""Largest relative error of a prediction."""
TOGETHER, APART = (PlannedGroup(("actor", "ref"), 1),), (PlannedGroup(("actor",), 1), PlannedGroup(("ref",), 1))
PLACEMENTS: Mapping[str, PlannedPlacement] = {
    "one_process": PlannedPlacement(TOGETHER),
    "copy": PlannedPlacement(TOGETHER, Sampling.copy, 1, max_staleness=1),
    "torchrun": PlannedPlacement((PlannedGroup(("actor", "ref"), 2),)),
    "reference": PlannedPlacement(APART),
    "workers": PlannedPlacement(TOGETHER, Sampling.workers, 1, max_staleness=1),
}


def experiment_words(task: Path, steps: int, prompts: int = PROMPTS, length: int = LENGTH) -> list[str]:
    """Return the overrides of a run with a batch size and a length of responses."""
    return [
        *common(task, steps, "at_once"),
        f"interfaces.actor.generation.max_new_tokens={length}",
        f"models.actor.path={task / 'larger'}",
        "models.actor.optimizer.lr=1e-3",
        f"batch_prompts={prompts}",
        f"interfaces.actor.generation.n={GROUP}",
        "graph._target_=realign.interfaces.decoupled_ppo.dataflow",
        "interfaces.actor._target_=realign.interfaces.decoupled_ppo.DecoupledPPOActorInterface",
        "interfaces.actor.adv_norm={mean: group, std: group}",
        "interfaces.actor.kl.place=loss",
        "interfaces.reward.workers=0",
        "checkpoint=null",
    ]


def calibration_jobs(folder: Path, task: Path, steps: int) -> list[Job]:
    """Return the runs in one process that measure the costs. The first one is the placement `one_process`."""
    sizes = ((PROMPTS, LENGTH), (PROMPTS // 4, LENGTH), (PROMPTS, LENGTH // 4))
    return [
        Job(folder / f"measured_{number}", experiment_words(task, steps, prompts, length))
        for number, (prompts, length) in enumerate(sizes)
    ]


def options_for(jobs: Sequence[Job]) -> PlanOptions:
    """Return the options of a plan for two cores with the costs of finished runs."""
    return PlanOptions(devices=2, device=DeviceKind.cpu, runs=[str(job.folder) for job in jobs])


def load_of(words: Sequence[str], options: PlanOptions) -> Workload:
    """Return the work of the experiment."""
    from realign.config import compose
    from realign.config.experiment import build_experiment

    return workload_of(build_experiment(compose(list(words))), options)


def planner(words: Sequence[str], jobs: Sequence[Job]) -> tuple[Workload, Cluster]:
    """Return the work and the calibrated cluster, as `realign plan` determines them.

    The runs differ in length on purpose, so that the lengths of the plan are those of the first run alone.
    """
    options = options_for(jobs)
    load = load_of(words, options)
    options = with_measured_lengths(options, read_runs(options.folders[:1], load), load)
    load = load_of(words, options)
    cluster = Cluster(options, options.described_device())
    return load, calibrated(cluster, load, read_runs(options.folders, load))


def job_for(name: str, folder: Path, words: Sequence[str], load: Workload, options: PlanOptions) -> Job:
    """Return the run of a placement, with the launcher and the overrides that the planner prints."""
    placement = PLACEMENTS[name]
    program = TORCHRUN if launcher(placement, options)[0] == "torchrun" else REALIGN
    return Job(folder / name, [*words, *overrides(placement, load, options, "")], program)


def measured_step_s(job: Job, bound: int | None) -> float:
    """Return the mean seconds of a step with a full pipeline."""
    ends = job.series("seconds")
    full = full_steps(len(ends), bound)
    return (ends[full.stop - 1] - ends[full.start - 1]) / (full.stop - full.start)


def compared(prediction: Prediction, job: Job) -> dict[str, Any]:
    """Return the predicted and the measured seconds of a step."""
    bound = prediction.placement.max_staleness
    step_s = measured_step_s(job, bound)
    lags = job.series("rollout/version_lag")
    return {
        "step_s": round(step_s, 4),
        "predicted_s": round(prediction.step_s, 4),
        "error": round(prediction.step_s / step_s - 1, 3),
        "responses_per_s": round(PROMPTS * GROUP / step_s, 1),
        "staleness": round(statistics.fmean(lags), 2) if lags else 0.0,
        "predicted_staleness": round(prediction.staleness, 2),
    }


def validate(folder: Path, words: Mapping[str, str]) -> dict[str, Any]:
    """Measure the costs, predict the placements, run them, and compare."""
    folder.mkdir(parents=True, exist_ok=True)
    task, steps = prepare(folder / "task"), int(words["steps"])
    jobs = [job.run() for job in calibration_jobs(folder, task, steps)]
    base = jobs[0].words
    load, cluster = planner(base, jobs)
    names = words["placements"].split(",")
    predictions = {name: predict(PLACEMENTS[name], load, cluster) for name in names}
    rows = {}
    for name, prediction in predictions.items():
        job = jobs[0] if name == "one_process" else job_for(name, folder, base, load, cluster.options).run()
        rows[name] = compared(prediction, job)
    print(show(rows))
    good = all(abs(row["error"]) <= LIMIT for row in rows.values())
    return {"good": good, "scale": asdict(cluster.scale), "rows": rows}


def show(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the comparison as a table."""
    head = ("placement", "s/step", "predicted", "error", "responses/s", "staleness", "predicted")
    lines = [
        (
            name,
            f"{r['step_s']:.3f}",
            f"{r['predicted_s']:.3f}",
            f"{r['error']:+.0%}",
            f"{r['responses_per_s']:.0f}",
            f"{r['staleness']:.2f}",
            f"{r['predicted_staleness']:.2f}",
        )
        for name, r in rows.items()
    ]
    return table(head, lines)


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a prediction is not good."""
    words = arguments({"steps": "16", "placements": ",".join(PLACEMENTS), "folder": ""}, given)
    if wrong := [name for name in words["placements"].split(",") if name not in PLACEMENTS]:
        sys.exit(f"unknown placement {wrong[0]!r}; valid: {', '.join(PLACEMENTS)}")
    started = time.time()
    if words["folder"]:
        report = validate(Path(words["folder"]).resolve(), words)
    else:
        with tempfile.TemporaryDirectory() as folder:
            report = validate(Path(folder), words)
    print(json.dumps({"benchmark": "accuracy", "seconds": round(time.time() - started), **facts(), **report}))
    return not report["good"]


if __name__ == "__main__":
    sys.exit(main())
