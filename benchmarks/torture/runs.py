"""Runs by the command line: start them, let them wait at a chosen step, and compare what they leave."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from realign.records.checkpoint.folder import Checkpoint, CorruptCheckpoint, list_checkpoints

LIMIT_S = 300
"""Seconds without progress after which a run counts as hung."""
MARK = "REALIGN_TORTURE_MARK"
"""Variable with the file to which the reward function writes one byte per call."""
GATES = "REALIGN_TORTURE_GATES"
"""Variable with the numbers of the calls in which the reward function waits until the file `MARK.open.N` exists."""
REWARD = f"""
import os
import random
import time

import numpy as np
import torch

MARK = os.environ["{MARK}"]
GATES = [int(number) for number in os.environ.get("{GATES}", "").split()]
calls = 0

def score(prompt, response, row):
    global calls
    calls += 1
    with open(MARK, "a") as file:
        file.write(".")
    if calls in GATES:
        with open(f"{{MARK}}.reached.{{calls}}", "w"):
            pass
        while not os.path.exists(f"{{MARK}}.open.{{calls}}"):
            time.sleep(0.005)
    noise = random.random() + np.random.rand() + torch.rand(()).item()
    return len(response) / 5 + (response[:1] in "13579") + 0.1 * noise
"""
"""Reward of the runs. Untrained models get some of it. It draws from every global generator. The time of its last call
tells whether a rollout has ended.
"""
MEANT = ("config", "records")
"""Parts of the state that differ between two equal runs: paths, the number of checkpoints kept, and timings."""


@dataclass
class Run:
    """Folder of a run, and the command that starts or resumes it."""

    folder: Path
    command: list[str]
    mark: Path
    launches: int = 0

    @property
    def checkpoints(self) -> Path:
        """Return the folder of its checkpoints."""
        return self.folder / "checkpoints"

    def records(self, name: str = "metrics.jsonl") -> list[str]:
        """Return the complete lines of a file of the run."""
        path = self.folder / name
        return path.read_text().split("\n")[:-1] if path.is_file() else []

    def samples(self) -> list[tuple[str, str]]:
        """Return file and text of every recorded sample."""
        return [(name, line) for name in ("samples.jsonl", "eval_samples.jsonl") for line in self.records(name)]

    def steps(self) -> int:
        """Return the last recorded step."""
        lines = self.records()
        return json.loads(lines[-1])["step"] if lines else 0

    def good(self) -> list[Checkpoint]:
        """Return the valid checkpoints, newest last."""
        checkpoints = []
        for checkpoint in list_checkpoints(self.checkpoints):
            with suppress(CorruptCheckpoint):
                checkpoint.read()
                checkpoints.append(checkpoint)
        return checkpoints

    def writes(self) -> bool:
        """Return whether a checkpoint is being written or removed."""
        return self.checkpoints.is_dir() and any(name.startswith(".") for name in os.listdir(self.checkpoints))


class Launch:
    """Process of a run. Its output is in `log`, beside the folder of the run.

    Args:
        run: the run.
        more: further arguments of the command line.
        environment: further environment variables.
        prefix: command that executes the rest of its arguments.
    """

    def __init__(
        self,
        run: Run,
        more: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        run.launches += 1
        self.run, self.started = run, time.time()
        self.log = run.mark.with_name(f"{run.mark.stem}_{run.launches:02d}.log")
        source = str(Path(__file__).parents[2])
        variables = {MARK: str(run.mark), "PYTHONPATH": source, "OMP_WAIT_POLICY": "PASSIVE"}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*prefix, *run.command, *more],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables, **(environment or {})},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def wait_until(self, condition: Callable[[], bool], pause: float, limit_s: float = LIMIT_S) -> bool:
        """Wait for a condition; return whether it was true before the process ended."""
        while self.process.poll() is None:
            if condition():
                return True
            if time.time() - self.started > limit_s:
                raise RuntimeError(f"no progress within {limit_s:g} s; see {self.log}")
            time.sleep(pause)
        return False

    def judged(self) -> bool:
        """Return whether this process has finished a rollout."""
        return self.run.mark.exists() and self.run.mark.stat().st_mtime > self.started

    def where(self) -> str:
        """Return the phase in which the process was killed."""
        if not self.judged():
            return "start"
        metrics = self.run.folder / "metrics.jsonl"
        return "training" if self.run.mark.stat().st_mtime_ns > metrics.stat().st_mtime_ns else "rollout"

    def finish(self) -> None:
        """Wait for the process to end; raise an error if its exit code is not 0."""
        if code := self.process.wait(LIMIT_S):
            raise RuntimeError(f"{' '.join(self.run.command)} ended with {code}:\n{self.said()}")

    def said(self) -> str:
        """Return the last part of the log."""
        return self.log.read_text(errors="replace")[-3000:]


def compared(record: str) -> dict[str, Any]:
    """Return the metrics of a step without timings."""
    return {k: v for k, v in json.loads(record).items() if k != "seconds" and not k.endswith("_s")}


def learned(record: str) -> dict[str, Any]:
    """Return `compared` for runs with other settings, whose code fails in another way: failures of any kind as one."""
    metrics = compared(record)
    failures = sum(metrics.pop(k) for k in [*metrics] if k.startswith("failures/"))
    return metrics | {"settings": None, "failures": failures}


def hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of every weight file in a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
    }


def contents(checkpoint: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the hashes of a checkpoint's tensors, and its other state."""
    tree = json.loads((checkpoint / "state.json").read_text())["tree"]
    return hashes(checkpoint), {name: part for name, part in tree.items() if name not in MEANT}


def is_exact(reference: Run, run: Run, checkpoint: Checkpoint) -> bool:
    """Return whether all records of a run and its newest checkpoint equal those of the undisturbed run."""
    records, expected = run.records(), reference.records()
    same = [compared(record) for record in records] == [compared(record) for record in expected[: len(records)]]
    return same and contents(checkpoint.path) == contents(reference.checkpoints / checkpoint.path.name)


def differences(run: Run, reference: Run) -> dict[str, Any]:
    """Return what a finished run lost or changed, compared with the undisturbed run."""
    expected, samples = (Counter(each.samples()) for each in (reference, run))
    ours, theirs = ([learned(record) for record in each.records()] for each in (run, reference))
    return {
        "samples": expected.total(),
        "samples_lost": (expected - samples).total(),
        "samples_doubled": (samples - expected).total(),
        "metrics_equal": ours == theirs,
        "weights_equal": hashes(run.folder / "final") == hashes(reference.folder / "final") != {},
    }


def are_equal(result: Mapping[str, Any]) -> bool:
    """Return whether `differences` found none."""
    lost = result["samples_lost"] + result["samples_doubled"]
    return not lost and result["metrics_equal"] and result["weights_equal"]
