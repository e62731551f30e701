"""Cost of a step by batch size, its memory, and the startup time.

    python -m benchmarks.scaling                          # all three parts
    python -m benchmarks.scaling parts=cost,memory repeats=3 threads=2

cost      A GRPO training step on 1 to 16 times the same sequences, in alternation: wall-clock seconds, and CPU seconds
          of the process. Other programs hardly affect CPU seconds.
memory    Bytes of the live tensors that a step creates, which do not depend on the load of the machine. Measured for 1
          to 16 times the sequences at one token budget, for the largest batch at several budgets, and with a vocabulary
          of 32k. With this vocabulary no tensor may have tokens x vocabulary elements. Passes run in sequence
          (parallel_passes=off): concurrent passes share the budget, and each has a separate gradient until it is added.
start     Seconds to `realign --help`, to a composed config, and to the first training step of the demo, in separate
          processes. The demo is ended after that step.

Prints tables and, as the last line, one JSON object.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.batches import TrainStep, make_actor, make_rollout
from benchmarks.memory import MemoryCount
from benchmarks.peer.work import SCENARIOS, Scenario
from benchmarks.report import Seconds, alternate, arguments, facts, table
from realign.api import MicroBatchSpec
from realign.models.network.passes import ParallelPasses
from realign.models.network.settings import NetworkSettings

ROOT = Path(__file__).parents[1]
BASE = replace(SCENARIOS["long_tail"], name="scaling", prompts=2)
COPIES = (1, 2, 4, 8, 16)
BUDGET = 2048
OTHER_BUDGETS = (1024, 4096, 8192)
MIB = 2**20


def cost(scenario: Scenario, copies: Sequence[int], budget: int, repeats: int) -> list[dict[str, Any]]:
    """Measure seconds of a training step, and the cost of a sequence relative to the smallest batch."""
    step = TrainStep(make_actor(scenario), scenario)
    batches = {n: make_rollout(scenario, copies=n) for n in copies}
    found = alternate({n: partial(step, batch, budget) for n, batch in batches.items()}, repeats)
    each = {n: Seconds(seconds.wall / n, seconds.cpu / n) for n, seconds in found.items()}
    first = each[copies[0]]
    return [
        {
            "copies": n,
            "sequences": batch.n_sequences,
            "tokens": batch.lengths["input_ids"].total,
            "wall_s": round(found[n].wall, 4),
            "cpu_s": round(found[n].cpu, 4),
            "wall_per_sequence": round(each[n].wall / first.wall, 3),
            "cpu_per_sequence": round(each[n].cpu / first.cpu, 3),
        }
        for n, batch in batches.items()
    ]


def step_memory(scenario: Scenario, copies: int, budget: int, step: TrainStep) -> dict[str, Any]:
    """Measure the memory of one training step besides weights and optimizer state, which must exist already."""
    batch = make_rollout(scenario, copies=copies)
    parts = batch.split(MicroBatchSpec(max_tokens_per_microbatch=budget))
    with MemoryCount() as count:
        step(batch, budget)
    return {
        "sequences": batch.n_sequences,
        "budget": budget,
        "microbatches": len(parts),
        "microbatch_tokens": max(part.lengths["input_ids"].total for part in parts),
        "sampled_tokens": max(int(part["loss_mask"].sum()) for part in parts),
        "peak_mib": round(count.peak / MIB, 2),
        "largest_elements": count.largest,
    }


def memory(scenario: Scenario, copies: Sequence[int], budget: int, others: Sequence[int]) -> list[dict[str, Any]]:
    """Measure the peak memory of a step by batch size at one budget, and by budget with the largest batch."""
    step = TrainStep(make_actor(scenario, network=NetworkSettings(parallel_passes=ParallelPasses.off)), scenario)
    step(make_rollout(scenario), budget)  # creates the optimizer state
    sizes = [(n, budget) for n in copies] + [(copies[-1], other) for other in others]
    return [step_memory(scenario, n, limit, step) for n, limit in sizes]


def vocabulary(scenario: Scenario, copies: int, budget: int) -> dict[str, Any]:
    """Measure a step with a large vocabulary, on a batch that is larger than one chunk of logits.

    Raises:
        AssertionError: A tensor has as many elements as the logits of all sampled tokens of a micro-batch.
    """
    step = TrainStep(make_actor(scenario, network=NetworkSettings(parallel_passes=ParallelPasses.off)), scenario)
    step(make_rollout(scenario), budget)
    found = step_memory(scenario, copies, budget, step)
    logits = found["sampled_tokens"] * scenario.vocabulary
    assert found["largest_elements"] < logits, f"a tensor of {found['largest_elements']:,} elements was created"
    head = scenario.vocabulary * scenario.hidden
    return found | {
        "vocabulary": scenario.vocabulary,
        "logits_mib": round(4 * logits / MIB, 1),
        "head_weight_elements": head,
        "largest_of_logits": round(found["largest_elements"] / logits, 4),
    }


def child(command: list[str], *, until: Callable[[], bool] | None = None, limit_s: float = 300) -> dict[str, float]:
    """Measure the seconds and CPU seconds of a command, to its end or until a condition is true; then end it.

    Raises:
        RuntimeError: The command failed, ended before the condition was true, or exceeded the time limit.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
        try:
            while process.poll() is None and not (until is not None and until()):
                if time.perf_counter() - started > limit_s:
                    raise RuntimeError(f"{command} took more than {limit_s:.0f} s")
                time.sleep(0.005)
            seconds = time.perf_counter() - started
            reached = until() if until is not None else process.returncode == 0
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if not reached:
            output.seek(0)
            raise RuntimeError(f"{command} failed: {output.read().decode()[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(seconds, 3), "cpu_s": round(cpu, 3)}


def start(repeats: int) -> dict[str, dict[str, float]]:
    """Return the fastest of several starts of each kind. The minimum excludes delays by other programs."""
    realign = [sys.executable, "-m", "realign"]
    found = {
        "realign --help": [child([*realign, "--help"]) for _ in range(repeats)],
        "config composed": [child([*realign, "experiment=grpo_arithmetic", "--cfg", "job"]) for _ in range(repeats)],
        "first training step of the demo": [first_step() for _ in range(min(repeats, 2))],
    }
    return {name: {key: min(r[key] for r in rows) for key in ("wall_s", "cpu_s")} for name, rows in found.items()}


def first_step() -> dict[str, float]:
    """Start the demo, including its preparation, and wait for the metrics of its first training step."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "demo"
        metrics = folder / "sft" / "metrics.jsonl"

        def trained() -> bool:
            lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
            return any(json.loads(line).get("step", 0) >= 1 for line in lines if line.endswith("\n"))

        return child([sys.executable, "-m", "realign.demo", f"output_dir={folder}"], until=trained)


def show(report: dict[str, Any]) -> str:
    """Format the results as tables."""
    blocks = []
    if rows := report.get("cost"):
        cells = [
            [
                f"{r['copies']}x",
                *(str(r[k]) for k in ("sequences", "tokens", "wall_s", "cpu_s")),
                *(f"{r[k]:.2f}" for k in ("wall_per_sequence", "cpu_per_sequence")),
            ]
            for r in rows
        ]
        head = ["training step", "sequences", "tokens", "s", "CPU s", "s per sequence", "CPU s per sequence"]
        blocks.append(table(head, cells))
    if rows := report.get("memory"):
        keys = ("budget", "microbatches", "microbatch_tokens", "peak_mib", "largest_elements")
        cells = [[str(r["sequences"]), *(f"{r[k]:,}" for k in keys)] for r in rows]
        head = ["sequences", "budget", "micro-batches", "tokens of the largest", "peak MiB", "largest tensor"]
        blocks.append(table(head, cells))
    if r := report.get("vocabulary"):
        blocks.append(
            f"vocabulary {r['vocabulary']:,}, {r['sampled_tokens']:,} sampled tokens in a micro-batch: peak "
            f"{r['peak_mib']:,} MiB; logits alone would be {r['logits_mib']:,} MiB; the largest tensor has "
            f"{r['largest_of_logits']:.1%} of their elements"
        )
    if found := report.get("start"):
        cells = [[name, f"{r['wall_s']:.2f}", f"{r['cpu_s']:.2f}"] for name, r in found.items()]
        blocks.append(table(["start", "s", "CPU s"], cells))
    return "\n\n".join(blocks)


def main(given: list[str] | None = None) -> None:
    """Run the requested parts; print tables and the JSON line."""
    words = arguments({"parts": "cost,memory,start", "repeats": "5", "threads": "2"}, given)
    torch.set_num_threads(int(words["threads"]))
    parts, repeats = words["parts"].split(","), int(words["repeats"])
    report: dict[str, Any] = {"benchmark": "scaling", **facts()}
    if "cost" in parts:
        report["cost"] = cost(BASE, COPIES, BUDGET, repeats)
    if "memory" in parts:
        report["memory"] = memory(BASE, COPIES, BUDGET, OTHER_BUDGETS)
        report["vocabulary"] = vocabulary(replace(BASE, vocabulary=32_000), COPIES[-1], OTHER_BUDGETS[-1])
    if "start" in parts:
        report["start"] = start(repeats)
    print(show(report))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
