"""SIGKILL of one process of a run: time to recover, and difference of the final weights from an undisturbed run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.jobs import Job, Launch, command_of, descendants, kill
from benchmarks.report import table
from benchmarks.scale.runtimes import runtime_jobs, runtime_words


def recovery(folder: Path, task: Path, words: Mapping[str, str]) -> dict[str, Any]:
    """Kill both kinds of processes, and compare with the undisturbed runs."""
    steps = int(words["steps"])
    jobs = runtime_jobs(folder, [*runtime_words(task, steps), "checkpoint.every_steps=1"])
    rows = {}
    for name, strike in (("Ray, actor | reference", ray_worker), ("torchrun, 2 FSDP ranks", torchrun_rank)):
        alone = jobs[name]
        if alone.steps() < steps:  # the part `runtimes` did not run it
            alone.run()
        killed = replace(alone, folder=folder / f"{alone.folder.name}_killed")
        rows[name] = strike(killed, steps // 2) | {"difference": killed.largest_difference(alone)}
    head = ("killed process of", "run ended, s", "next step, s", "largest weight difference")
    lines = [
        (name, f"{r['ended_s']:.1f}" if r["ended_s"] else "no", f"{r['back_s']:.1f}", f"{r['difference']:.1e}")
        for name, r in rows.items()
    ]
    print(table(head, lines))
    return {"good": all(r["difference"] == 0 for r in rows.values()), "rows": rows}


def ray_worker(job: Job, step: int) -> dict[str, Any]:
    """Kill a worker; the run restarts it and continues."""
    with Launch(job) as launch:
        launch.wait_until(lambda: job.steps() >= step, f"step {step}")
        reached = job.steps()
        kill(one_of(launch, lambda command: command.startswith("ray::")))
        back_s = launch.wait_until(lambda: job.steps() > reached, "the step after the kill")
        launch.finish()
    return {"ended_s": 0.0, "back_s": round(back_s, 1)}


def torchrun_rank(job: Job, step: int) -> dict[str, Any]:
    """Kill a rank; torchrun ends the other ranks, and the same command with `resume=auto` resumes the run."""
    with Launch(job) as launch:
        launch.wait_until(lambda: job.steps() >= step, f"step {step}")
        killed = time.time()
        kill(one_of(launch, lambda command: "realign" in command))
        if not launch.process.wait(120):
            raise RuntimeError("torchrun exited with 0 although a rank was killed")
        ended_s = time.time() - killed
    reached = job.steps()
    with Launch(job, "resume=auto") as launch:
        back_s = launch.wait_until(lambda: job.steps() > reached, "the step after the kill")
        launch.finish()
    return {"ended_s": round(ended_s, 1), "back_s": round(back_s, 1)}


def one_of(launch: Launch, is_it: Callable[[str], bool]) -> int:
    """Return the youngest process of a run whose command line fulfills a condition."""
    pids = [pid for pid in descendants(launch.process.pid) if is_it(command_of(pid))]
    if not pids:
        raise RuntimeError(f"{launch.job.folder.name} has no process of this kind")
    return max(pids)
