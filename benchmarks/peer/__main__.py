"""Training steps of realign and TRL on the same work, in alternation. The last line is one JSON object.

    python -m benchmarks.peer                                   # every scenario, 5 steps of each side
    python -m benchmarks.peer scenarios=long_tail steps=3 threads=2

The two sides run in separate processes and take turns: one waits while the other works. The benchmark first tries
several micro-batch sizes for TRL and uses the fastest one. Response lengths are drawn beforehand and replayed by both
sides. Each side samples from its model as usual, and the benchmark inserts the end token at the forced length.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer.work import SCENARIOS, Scenario, write_prompts
from benchmarks.report import arguments
from benchmarks.report import table as columns

ROOT = Path(__file__).parents[2]
TRL_PPO = Path(os.environ.get("REALIGN_BENCH_TRL_PPO", ROOT / ".bench" / "trl_ppo"))
TRL_MICRO_BATCHES = (8, 16, 32, 64)
DEFAULT = ["long_tail", "short_tail", "long_prompts", "large_vocabulary", "many", "ppo_long_tail"]


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
        environment |= {
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": python_path(spec["side"]),
            "WANDB_DISABLED": "true",
        }
        environment |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        self.log = (folder / f"{side}.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peer.worker", json.dumps(spec)],
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


def matrix_peak(threads: int) -> float:
    """Return the FLOP/s of the best of several fp32 matrix products."""
    code = (
        f"import torch, time; torch.set_num_threads({threads}); best = 0.0\n"
        "for n in (1024, 2048):\n"
        "    a, b = torch.randn(n, n), torch.randn(n, n); a @ b\n"
        "    for _ in range(5):\n"
        "        t = time.perf_counter(); a @ b; best = max(best, 2 * n**3 / (time.perf_counter() - t))\n"
        "print(best)"
    )
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)}
    return float(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)


def fastest_trl(
    scenario: Scenario, folder: Path, threads: int, device: str, micro_batches: Sequence[int]
) -> dict[str, float]:
    """Measure the seconds of TRL's second step for every micro-batch size that divides the batch."""
    seconds = {}
    for micro in micro_batches:
        if micro <= scenario.sequences and scenario.sequences % micro == 0:
            worker = Worker("trl", scenario, folder, 2, threads, per_device_train_batch_size=micro, device=device)
            worker.step(1)
            seconds[str(micro)] = worker.step(2)["wall"]
            worker.close()
    return seconds


def compare(
    scenario: Scenario,
    steps: int,
    threads: int,
    *,
    device: str = "cpu",
    micro_batches: Sequence[int] = TRL_MICRO_BATCHES,
    peak: float | None = None,
) -> dict[str, Any]:
    """Run both sides in alternation, one step at a time, after one warm-up step of each.

    Args:
        scenario: One of `SCENARIOS`.
        steps: Number of measured steps.
        threads: Threads of each side.
        device: cpu (fp32), or cuda for GRPO (bf16 compute with fp32 weights).
        micro_batches: Numbers of sequences per micro-batch to try with TRL.
        peak: FLOP/s of the device; None measures them between the steps, in fp32 on the CPU.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        scenario.save_models(folder)
        write_prompts(scenario, steps + 1, folder / "prompts.jsonl")
        tried = fastest_trl(scenario, folder, threads, device, micro_batches)
        micro = int(min(tried, key=tried.__getitem__)) if tried else scenario.sequences
        options: dict[str, dict[str, Any]] = {
            "realign": {"device": device},
            "trl": {"device": device, "per_device_train_batch_size": micro},
        }
        sides = {name: Worker(name, scenario, folder, steps + 1, threads, **options[name]) for name in options}
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        peaks = [] if peak is None else [peak]
        for number in range(1, steps + 2):
            order = list(sides) if number % 2 else list(sides)[::-1]
            for name in order:
                results[name].append(sides[name].step(number))
            if peak is None:
                peaks.append(matrix_peak(threads))
        for worker in sides.values():
            worker.close()
    return summary(scenario, {name: r[1:] for name, r in results.items()}, max(peaks), tried)


def summary(
    scenario: Scenario, results: dict[str, list[dict[str, Any]]], peak: float, tried: dict[str, float]
) -> dict[str, Any]:
    """Return medians, ratios and hardware utilization."""

    def median(name: str, key: str) -> float:
        return statistics.median(r[key] for r in results[name])

    ours, theirs = results["realign"], results["trl"]
    for a, b in zip(ours, theirs, strict=True):
        assert a["lengths"] == b["lengths"], "the two sides did different work: their response lengths differ"
        assert sum(a["prompt_tokens"]) == sum(b["prompt_tokens"]), "the two sides used different prompts"
    flops = [sum(scenario.flops(r["prompt_tokens"], r["lengths"]).values()) for r in ours]
    parts = ("wall", "rollout", "training")
    overhead = statistics.median(1 - r["model_work"] / r["wall"] for r in ours)
    return {
        "scenario": scenario.name,
        "seconds": {name: {part: round(median(name, part), 4) for part in parts} for name in results},
        "ratio": {part: round(median("trl", part) / median("realign", part), 2) for part in parts},
        "ratio_range": [
            round(f(b["wall"] / a["wall"] for a, b in zip(ours, theirs, strict=True)), 2) for f in (min, max)
        ],
        "tokens_per_second": {
            name: round(statistics.median(sum(r["lengths"]) / r["wall"] for r in rs)) for name, rs in results.items()
        },
        "peak_mib": {name: round(max(r["peak_mib"] for r in rs)) for name, rs in results.items()},
        "step_mib": {name: round(max(r["peak_mib"] - r["loaded_mib"] for r in rs)) for name, rs in results.items()},
        "peak_gflops": round(peak / 1e9, 1),
        "utilisation": {
            name: round(statistics.median(f / r["wall"] for f, r in zip(flops, rs, strict=True)) / peak, 3)
            for name, rs in results.items()
        },
        "overhead": round(overhead, 4),
        "trl_micro_batches_s": {k: round(v, 3) for k, v in tried.items()},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Format the results as a table."""
    head = (
        "scenario",
        "TRL s",
        "ours s",
        "ratio",
        "rollout",
        "training",
        "use of peak",
        "overhead",
        "step MiB TRL/ours",
    )
    lines = [
        (
            r["scenario"],
            f"{r['seconds']['trl']['wall']:.2f}",
            f"{r['seconds']['realign']['wall']:.2f}",
            f"{r['ratio']['wall']:.2f} ({r['ratio_range'][0]:.1f}-{r['ratio_range'][1]:.1f})",
            f"{r['ratio']['rollout']:.2f}",
            f"{r['ratio']['training']:.2f}",
            f"{r['utilisation']['trl']:.0%} / {r['utilisation']['realign']:.0%}",
            f"{r['overhead']:.1%}",
            f"{r['step_mib']['trl']} / {r['step_mib']['realign']}",
        )
        for r in rows
    ]
    return columns(head, lines)


def main() -> None:
    """Run the requested scenarios; print the table and the JSON line."""
    given = arguments({"scenarios": ",".join(DEFAULT), "steps": "5", "threads": "2"})
    names = given["scenarios"].split(",")
    if wrong := [name for name in names if name not in SCENARIOS]:
        sys.exit(f"unknown scenario {wrong[0]!r}; valid: {', '.join(SCENARIOS)}")
    rows = []
    for name in names:
        started = time.perf_counter()
        rows.append(compare(SCENARIOS[name], int(given["steps"]), int(given["threads"])))
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    print(table(rows))
    print(json.dumps({"benchmark": "grpo", "scenarios": rows}))


if __name__ == "__main__":
    main()
