"""Training runs as subprocesses: start, follow through metrics.jsonl, kill and compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
from safetensors.torch import load_file

LIMIT_S = 300
ROOT = Path(__file__).parents[1]
REALIGN = (sys.executable, "-m", "realign")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "realign")


@dataclass(frozen=True)
class Job:
    """A run: its folder, and the command that starts or resumes it."""

    folder: Path
    words: Sequence[str]
    """Command-line overrides."""
    program: Sequence[str] = REALIGN

    def records(self) -> list[dict[str, Any]]:
        """Return the complete lines of the run's metrics, except those from before training."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [row for row in map(json.loads, lines) if row["step"]]

    def steps(self) -> int:
        """Return the last recorded step."""
        rows = self.records()
        return int(rows[-1]["step"]) if rows else 0

    def series(self, name: str) -> list[float]:
        """Return the values of a metric."""
        return [row[name] for row in self.records() if name in row]

    def largest_difference(self, other: Job, role: str = "actor") -> float:
        """Return the largest difference of the final weights of two runs. 0 means bitwise equality."""
        mine, theirs = (load_file(job.folder / "final" / role / "model.safetensors") for job in (self, other))
        if mine.keys() != theirs.keys():
            raise RuntimeError(f"{self.folder.name} and {other.folder.name} have different weights")
        return max(0.0 if x.equal(theirs[name]) else float((x - theirs[name]).abs().max()) for name, x in mine.items())

    def run(self, limit_s: float = LIMIT_S) -> Self:
        """Run to completion; raise an error if the exit code is not 0 or it takes longer."""
        with Launch(self) as launch:
            launch.finish(limit_s)
        return self


class Launch:
    """The process of a job, including its descendants."""

    def __init__(self, job: Job, *more: str) -> None:
        """Start the process with the arguments of the job, followed by `more`."""
        self.job, self.started = job, time.time()
        number = len(list(job.folder.parent.glob(f"{job.folder.name}_*.log"))) + 1
        self.log = job.folder.parent / f"{job.folder.name}_{number:02d}.log"
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as out:
            command = [*job.program, *job.words, f"output_dir={job.folder}", *more]
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            kill_descendants(psutil.Process(self.process.pid))
        self.process.kill()
        self.process.wait()

    def wait_until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait for a condition and return the seconds until it was true.

        Raises:
            RuntimeError: The process ended first, or the time limit was exceeded.
        """
        began = time.time()
        while not condition():
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.job.folder.name} ended before {what}:\n{self.said()}")
            if time.time() - began > LIMIT_S:
                raise RuntimeError(f"{self.job.folder.name}: waited {LIMIT_S} s for {what}:\n{self.said()}")
            time.sleep(0.02)
        return time.time() - began

    def finish(self, limit_s: float = LIMIT_S) -> None:
        """Wait for the process to end; raise an error if its exit code is not 0."""
        if code := self.process.wait(limit_s):
            raise RuntimeError(f"{' '.join(map(str, self.process.args))} ended with {code}:\n{self.said()}")

    def said(self) -> str:
        """Return the last part of the log."""
        return self.log.read_text(errors="replace")[-3000:]


def kill_descendants(process: psutil.Process) -> None:
    """Send SIGKILL to all descendants of a process."""
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
