"""Cost of a step by batch size, and its memory.

    python -m benchmarks.scaling                          # both parts
    python -m benchmarks.scaling parts=cost repeats=3 threads=2

cost      A GRPO training step on 1 to 16 times the same sequences, in alternation: wall-clock seconds, and CPU seconds
          of the process. Other programs hardly affect CPU seconds.
memory    Bytes of the live tensors that a step creates, which do not depend on the load of the machine. Measured for 1
          to 16 times the sequences at one token budget, and for the largest batch at several budgets. Passes run in
          sequence (parallel_passes=off): concurrent passes share the budget, and each has a separate gradient until it
          is added.

Prints tables and, as the last line, one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.batches import TrainStep, make_actor, make_rollout
from benchmarks.memory import MemoryCount
from benchmarks.peer.work import SCENARIOS, Scenario
from benchmarks.report import Seconds, alternate, arguments, facts, table
from realign.api import MicroBatchSpec
from realign.models.network.passes import ParallelPasses
from realign.models.network.settings import NetworkSettings

BASE = replace(SCENARIOS["long_tail"], name="scaling", prompts=2)
COPIES = (1, 2, 4, 8, 16)
BUDGET = 2048
OTHER_BUDGETS = (1024, 4096, 8192)
MIB = 2**20


def cost(scenario: Scenario, copies: Sequence[int], budget: int, repeats: int) -> list[dict[str, Any]]:
    """Measure seconds of a training step, and the cost of a sequence relative to the smallest batch."""
    step = TrainStep(make_actor(scenario), scenario)
    batches = {n: make_rollout(scenario, copies=n) for n in copies}
    timed = alternate({n: partial(step, batch, budget) for n, batch in batches.items()}, repeats)
    each = {n: Seconds(seconds.wall / n, seconds.cpu / n) for n, seconds in timed.items()}
    first = each[copies[0]]
    return [
        {
            "copies": n,
            "sequences": batch.n_sequences,
            "tokens": batch.lengths["input_ids"].total,
            "wall_s": round(timed[n].wall, 4),
            "cpu_s": round(timed[n].cpu, 4),
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
    return "\n\n".join(blocks)


def main(given: list[str] | None = None) -> None:
    """Run the requested parts; print tables and the JSON line."""
    words = arguments({"parts": "cost,memory", "repeats": "5", "threads": "2"}, given)
    torch.set_num_threads(int(words["threads"]))
    parts, repeats = words["parts"].split(","), int(words["repeats"])
    report: dict[str, Any] = {"benchmark": "scaling", **facts()}
    if "cost" in parts:
        report["cost"] = cost(BASE, COPIES, BUDGET, repeats)
    if "memory" in parts:
        report["memory"] = memory(BASE, COPIES, BUDGET, OTHER_BUDGETS)
    print(show(report))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
