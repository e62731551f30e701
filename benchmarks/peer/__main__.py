"""Training steps of realign and TRL, and rollouts of realign, vLLM and llama.cpp, on the same work in alternation.

    python -m benchmarks.peer                                   # every scenario, 3 steps of each side
    python -m benchmarks.peer parts=steps scenarios=long_tail steps=3 threads=2
    python -m benchmarks.peer parts=steps scenarios=real steps=1 micro=16   # one micro-batch size of TRL
    python -m benchmarks.peer parts=rollouts scenarios=long_tail

Prints tables and, as the last line, one JSON object.

The sides run in separate processes and take turns: one works while the others wait. Each turn has an unmeasured step
and a measured one, since steps of a run don't follow a pause. The benchmark first tries several micro-batch sizes and
numbers of threads for TRL, and uses the fastest ones. Rollouts use one thread each. Response lengths are drawn
beforehand and replayed by all sides. realign and TRL sample as usual, and the benchmark inserts the end token at the
forced length. The other sides ignore end tokens and stop at the length.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peer import rollouts
from benchmarks.peer.notes import marked, notes
from benchmarks.peer.process import STEPS_OF_A_TURN, Worker, turns
from benchmarks.peer.work import SCENARIOS, Scenario, write_prompts
from benchmarks.report import arguments, facts
from benchmarks.report import table as columns
from realign.functional.rounding import multiplies_bf16

TRL_MICRO_BATCHES = (8, 16, 32, 64)
DEFAULT = ["real", "long_tail", "short_tail", "long_prompts", "large_vocabulary", "many", "ppo_long_tail"]


def possible(name: str) -> Scenario:
    """Return a scenario, or its twin in fp32 (`real32` of `real`) if this CPU has no instructions for bf16.

    Without them, a product in bf16 takes a hundred times as long as in fp32.
    """
    return SCENARIOS[name] if multiplies_bf16() else SCENARIOS.get(f"{name}32", SCENARIOS[name])


class Choice(NamedTuple):
    """Settings of TRL."""

    threads: int
    micro_batch: int
    bf16: bool


def matrix_peak(threads: int, dtype: str) -> float:
    """Return the FLOP/s of the best of several matrix products in a torch dtype."""
    code = (
        f"import torch, time; torch.set_num_threads({threads}); best = 0.0\n"
        "for n in (1024, 2048):\n"
        f"    a, b = (torch.randn(n, n).to(torch.{dtype}) for _ in range(2)); a @ b\n"
        "    for _ in range(5):\n"
        "        t = time.perf_counter(); a @ b; best = max(best, 2 * n**3 / (time.perf_counter() - t))\n"
        "print(best)"
    )
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)}
    return float(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)


def fastest_trl(
    scenario: Scenario, folder: Path, threads: Sequence[int], device: str, micro_batches: Sequence[int]
) -> dict[Choice, float]:
    """Measure the seconds of TRL's second step, by its settings.

    Tries every micro-batch size that divides the batch with the first number of threads. Then it tries the fastest size
    with the other numbers, and in fp32 if the scenario leaves the precision to each side.
    """

    def second_step(choice: Choice) -> float:
        count, micro, bf16 = choice
        options = {"per_device_train_batch_size": micro, "device": device, "bf16": bf16}
        worker = Worker("trl", scenario, folder, 2, count, **options)
        worker.step(1)
        wall: float = worker.step(2)["wall"]
        worker.close()
        return wall

    sizes = [n for n in micro_batches if n <= scenario.sequences and scenario.sequences % n == 0]
    low = scenario.bf16 or device != "cpu"
    first = [Choice(threads[0], n, low) for n in sizes or [scenario.sequences]]
    seconds = {choice: second_step(choice) for choice in first}
    best = min(seconds, key=seconds.__getitem__)
    further = [best._replace(threads=count) for count in threads[1:]]
    further += [best._replace(bf16=False)] if scenario.bf16 else []
    return seconds | {choice: second_step(choice) for choice in further}


def measurements(
    scenario: Scenario,
    steps: int,
    threads: int,
    *,
    device: str = "cpu",
    micro_batches: Sequence[int] = TRL_MICRO_BATCHES,
    peak: float | None = None,
) -> Iterator[dict[str, Any]]:
    """Run both sides in alternation, and measure the second step of each turn.

    Yields the settings that were tried with TRL, then the seconds of each step, and at last the `summary`.

    Args:
        scenario: One of `SCENARIOS`.
        steps: Number of measured steps.
        threads: Threads of realign. TRL uses the faster of this number and 1.
        device: cpu (fp32, unless the scenario has bf16), or cuda for GRPO (bf16 compute with fp32 weights).
        micro_batches: Numbers of sequences per micro-batch to try with TRL.
        peak: FLOP/s of the device; None measures them between the steps on the CPU.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        scenario.save_models(folder)
        worked = steps * STEPS_OF_A_TURN
        write_prompts(scenario, worked, folder / "prompts.jsonl")
        counts = sorted({1, threads}, reverse=True) if device == "cpu" else [threads]
        tried = fastest_trl(scenario, folder, counts, device, micro_batches)
        yield {"trl_tried": told(tried)}
        best = min(tried, key=tried.__getitem__)
        options: dict[str, dict[str, Any]] = {
            "realign": {"device": device},
            "trl": {"device": device, "per_device_train_batch_size": best.micro_batch, "bf16": best.bf16},
        }
        used = {"realign": threads, "trl": best.threads}
        sides = {name: Worker(name, scenario, folder, worked, used[name], **options[name]) for name in options}
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        peaks = [] if peak is None else [peak]
        for number, answers in enumerate(turns(sides, steps), 1):
            for name, answer in answers.items():
                results[name].append(answer)
            yield {"step": number, "seconds": {name: round(answer["wall"], 4) for name, answer in answers.items()}}
            if peak is None:
                peaks.append(matrix_peak(threads, "bfloat16" if scenario.bf16 else "float32"))
    yield summary(scenario, results, max(peaks), tried)


def summary(
    scenario: Scenario, results: dict[str, list[dict[str, Any]]], peak: float, tried: dict[Choice, float]
) -> dict[str, Any]:
    """Return medians, ratios and hardware utilization."""
    best = min(tried, key=tried.__getitem__)

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
        "trl": best._asdict(),
        "trl_tried": told(tried),
    }


def told(tried: dict[Choice, float]) -> list[dict[str, float]]:
    """Return what `fastest_trl` measured, for a result."""
    return [choice._asdict() | {"step_s": round(seconds, 3)} for choice, seconds in tried.items()]


def table(rows: list[dict[str, Any]]) -> str:
    """Format the results as a table."""
    head = (
        "scenario",
        "TRL s",
        "TRL threads, micro-batch",
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
            marked(r["scenario"]),
            f"{r['seconds']['trl']['wall']:.2f}",
            f"{r['trl']['threads']}, {r['trl']['micro_batch']}{', bf16' if r['trl']['bf16'] else ''}",
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


PARTS = ("steps", "rollouts")


def main(given: Sequence[str] | None = None) -> None:
    """Run the requested parts and scenarios; print the tables, their notes and the JSON line."""
    defaults = {"parts": ",".join(PARTS), "scenarios": ",".join(DEFAULT), "steps": "3", "threads": "2"}
    defaults["micro"] = ",".join(map(str, TRL_MICRO_BATCHES))
    words = arguments(defaults, given)
    parts, names, steps = words["parts"].split(","), words["scenarios"].split(","), int(words["steps"])
    for kind, chosen, known in (("part", parts, PARTS), ("scenario", names, SCENARIOS)):
        if wrong := [name for name in chosen if name not in known]:
            sys.exit(f"unknown {kind} {wrong[0]!r}; valid: {', '.join(known)}")
    scenarios = [possible(name) for name in names]
    names = [scenario.name for scenario in scenarios]
    found: dict[str, list[dict[str, Any]]] = {"scenarios": [], "rollouts": []}
    for scenario in scenarios:
        started = time.perf_counter()
        if "steps" in parts:
            sizes = [int(size) for size in words["micro"].split(",")]
            *_, result = measurements(scenario, steps, int(words["threads"]), micro_batches=sizes)
            found["scenarios"].append(result)
        if "rollouts" in parts:
            found["rollouts"].append(rollouts.compare(scenario, steps))
        print(f"{scenario.name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    if found["scenarios"]:
        print(table(found["scenarios"]))
    if found["rollouts"]:
        print(rollouts.table(found["rollouts"]))
    print(notes(names, parts))
    print(json.dumps({"benchmark": "grpo", **facts(), **found}))


if __name__ == "__main__":
    main()
