"""Runs of the command line as processes: started, watched through their metrics.jsonl, killed, and compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from safetensors.torch import load_file

LIMIT_S = 300
ROOT = Path(__file__).parents[1]
REALIGN = (sys.executable, "-m", "realign")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "realign")


@dataclass(frozen=True)
class Job:
    """A run: its folder, and the command that starts it or goes on with it."""

    folder: Path
    words: Sequence[str]
    """Overrides of the command line."""
    program: Sequence[str] = REALIGN

    def records(self) -> list[dict[str, Any]]:
        """The complete lines of its metrics, without the one from before training."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [row for row in map(json.loads, lines) if row["step"]]

    def steps(self) -> int:
        """The last step on record."""
        rows = self.records()
        return int(rows[-1]["step"]) if rows else 0

    def series(self, name: str) -> list[float]:
        """The values of a metric."""
        return [row[name] for row in self.records() if name in row]

    def largest_difference(self, other: Job, role: str = "actor") -> float:
        """Between the final weights of the two runs; 0 means that every bit is the same."""
        mine, theirs = (load_file(job.folder / "final" / role / "model.safetensors") for job in (self, other))
        if mine.keys() != theirs.keys():
            raise RuntimeError(f"{self.folder.name} and {other.folder.name} have different weights")
        return max(0.0 if x.equal(theirs[name]) else float((x - theirs[name]).abs().max()) for name, x in mine.items())

    def run(self) -> Self:
        """From start to end, which must be a good one."""
        with Launch(self) as launch:
            launch.finish()
        return self


class Launch:
    """The process of a job, with all those that it starts."""

    def __init__(self, job: Job, *more: str) -> None:
        """Start it; `more` words go behind those of the job."""
        self.job, self.started = job, time.time()
        number = len(list(job.folder.parent.glob(f"{job.folder.name}_*.log"))) + 1
        self.log = job.folder.parent / f"{job.folder.name}_{number:02d}.log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as out:
            command = [*job.program, *job.words, f"output_dir={job.folder}", *more]
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*descendants(self.process.pid)] if self.process.poll() is None else []:
            kill(pid)
        self.process.kill()
        self.process.wait()

    def wait_until(self, condition: Callable[[], bool], what: str) -> float:
        """Seconds until it came true.

        Raises:
            RuntimeError: the process ended before, or nothing happened for long.
        """
        began = time.time()
        while not condition():
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.job.folder.name} ended before {what}:\n{self.said()}")
            if time.time() - began > LIMIT_S:
                raise RuntimeError(f"{self.job.folder.name}: waited {LIMIT_S} s for {what}:\n{self.said()}")
            time.sleep(0.02)
        return time.time() - began

    def finish(self) -> None:
        """Wait for the end, which must be a good one."""
        if code := self.process.wait(LIMIT_S):
            raise RuntimeError(f"{' '.join(map(str, self.process.args))} ended with {code}:\n{self.said()}")

    def said(self) -> str:
        """The end of what it wrote to the screen."""
        return self.log.read_text(errors="replace")[-3000:]


def descendants(pid: int) -> Iterator[int]:
    """Processes that a process has started, and those that these have (Linux)."""
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            for child in map(int, thread.read_text().split()):
                yield child
                yield from descendants(child)


def command_of(pid: int) -> str:
    """Its command line, or the name that it gave itself; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def kill(pid: int) -> None:
    """SIGKILL, to one that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
