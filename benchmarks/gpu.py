"""Hardware utilization of training and rollout. The last line is one JSON object.

    python -m benchmarks.gpu                      # CUDA: Qwen2 with 0.5B and 1.5B weights
    python -m benchmarks.gpu parts=peak,training  # some parts only
    python -m benchmarks.gpu device=cpu           # smoke test of the same code with tiny shapes, in seconds

peak       Peak rate of matrix products: the best of several square products in bf16.
training   GRPO training steps of each shape with bf16 compute and fp32 weights. Batches have long-tailed lengths and
           are packed to 32k tokens per micro-batch, halved until a micro-batch fits in memory. Reports tokens per
           second, useful FLOP/s and their fraction of the peak, peak memory with the full vocabulary of 152k, and the
           kernel of packed attention. The prompt of a group counts once, and recomputation does not count. The same
           steps also run with `torch_compile`.
rollout    Tokens of responses per second for the same prompts and lengths: realign, realign with a synchronization at
           every decode step, with kept memory and with CUDA graphs, transformers' `generate` (a batch runs until its
           longest response ends) and transformers' continuous batching.
sampler    The decode loop: a step that waits for the device is an error. Compares samples with and without
           synchronization at every step, and counts the memory that a further rollout allocates.
trl        GRPO steps of realign and TRL in alternation, as in `benchmarks.peer`. Skipped if TRL is not installed.

A failing part is reported with its error, and the other parts still run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.batches import TrainStep, make_actor, make_rollout
from benchmarks.gpu_plan import CPU, CUDA, Plan, attempt, positions, release, timed
from benchmarks.gpu_rollout import rollout, sampler
from benchmarks.memory import MemoryCount
from benchmarks.peer.work import Scenario
from benchmarks.report import arguments, facts, table
from realign.engines.network.kernels import AttentionArgs, Backend, choose_backend
from realign.engines.network.settings import NetworkSettings

GIB = 2**30
PARTS = ("peak", "training", "rollout", "sampler", "trl")


def matrix_peak(plan: Plan, repeats: int = 10) -> float:
    """Return the FLOP/s of the best of several matrix products."""
    best = 0.0
    for n in plan.matrix:
        a, b = (torch.randn(n, n, device=plan.device, dtype=plan.dtype) for _ in range(2))
        timed(lambda a=a, b=b: a @ b, plan.device)
        seconds = timed(lambda a=a, b=b: [a @ b for _ in range(repeats)], plan.device)
        best = max(best, repeats * 2 * n**3 / seconds)
    return best


def attention_backend(plan: Plan, scenario: Scenario) -> str:
    """Return the kernel of packed attention for layers of this shape."""
    size = scenario.hidden // scenario.heads
    q = torch.empty(1, scenario.heads, 1, size, device=plan.device, dtype=plan.dtype)
    return choose_backend(Backend.auto, q, q, AttentionArgs(size**-0.5, 0.0, None, None, None)).value


def training(plan: Plan, scenario: Scenario, peak: float) -> dict[str, Any]:
    """Measure training steps of one shape at the largest token budget that fits in memory."""
    budget = plan.budget
    while True:
        try:
            found = _train(plan, scenario, budget, peak)
            break
        except torch.cuda.OutOfMemoryError:
            if budget < 2 * positions(scenario):
                raise
            budget //= 2
        release(plan.device)
    release(plan.device)
    compiled = attempt(
        lambda: _train(plan, scenario, budget, peak, network=NetworkSettings(torch_compile=plan.compiler))
    )
    keys = ("step_s", "tokens_per_s", "utilisation", "peak_gib", "error")
    return found | {"compiled": {key: compiled[key] for key in keys if key in compiled}}


def _train(plan: Plan, scenario: Scenario, budget: int, peak: float, **engine: Any) -> dict[str, Any]:
    actor = make_actor(
        scenario,
        device=plan.device,
        dtype=plan.dtype,
        config={"tie_word_embeddings": True, "max_position_embeddings": positions(scenario)},
        **engine,
    )
    step, batch = TrainStep(actor, scenario), make_rollout(scenario)
    step(batch, budget)
    seconds = statistics.median(timed(lambda: step(batch, budget), plan.device) for _ in range(plan.steps))
    loaded, most = _memory(plan, lambda: step(batch, budget))
    given = [int(mask.sum()) for mask in batch.sequences("prompt_mask")][:: scenario.group]
    flops = scenario.flops(given, scenario.lengths(1))["training"]
    sampled, tokens = int(batch["loss_mask"].sum()), batch.lengths["input_ids"].total
    return {
        "parameters": sum(p.numel() for p in actor.engine.network.parameters()),
        "vocabulary": scenario.vocabulary,
        "microbatch_tokens": budget,
        "tokens": tokens,
        "step_s": round(seconds, 4),
        "tokens_per_s": round(tokens / seconds),
        "tflops": round(flops / seconds / 1e12, 4),
        "utilisation": round(flops / seconds / peak, 4),
        "loaded_gib": round(loaded / GIB, 3),
        "peak_gib": round(most / GIB, 3),
        "logits_gib": round(4 * min(sampled, budget) * scenario.vocabulary / GIB, 3),
        "attention": attention_backend(plan, scenario),
    }


def _memory(plan: Plan, call: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes on the device before a call (0 on a CPU) and the peak during the call."""
    if plan.device != "cuda":
        with MemoryCount() as count:
            call()
        return 0, count.peak
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return before, torch.cuda.max_memory_allocated()


def trl(plan: Plan, peak: float) -> dict[str, Any]:
    """Compare GRPO steps with TRL, or return the reason why TRL is not measured."""
    if find_spec("trl") is None:
        return {"left_out": "trl is not installed"}
    from benchmarks.peer.__main__ import compare

    threads = torch.get_num_threads()
    found = compare(plan.trl, steps=2, threads=threads, device=plan.device, micro_batches=(32, 64), peak=peak)
    # The other results describe the host: its memory, and timings that do not wait for the device.
    told = ("scenario", "seconds", "ratio", "ratio_range", "tokens_per_second", "utilisation", "trl", "trl_tried")
    return {key: found[key] for key in told}


def show(report: dict[str, Any]) -> str:
    """Format the results as tables."""
    lines = [f"{report['device']}, matrix peak {report['peak_tflops']:,.2f} TFLOP/s in {report['dtype']}"]
    keys = ("microbatch_tokens", "tokens_per_s", "tflops", "utilisation", "peak_gib", "logits_gib", "attention")
    if done := [r for r in report.get("training", []) if "error" not in r]:
        cells = [[r["model"], *(f"{r[k]:,}" if isinstance(r[k], (int, float)) else r[k] for k in keys)] for r in done]
        lines += [table(["training", *keys], cells)]
        plain = {r["model"]: r["step_s"] / r["compiled"]["step_s"] for r in done if "step_s" in r["compiled"]}
        lines += [f"torch_compile: {name} {ratio:.2f}x" for name, ratio in plain.items()]
    if found := report.get("rollout"):
        sides = {name: r for name, r in found.items() if isinstance(r, dict) and "tokens_per_s" in r}
        cells = [[name, f"{r['tokens_per_s']:,}", f"{r['seconds']:.2f}"] for name, r in sides.items()]
        lines += [table(["rollout", "tokens/s", "s"], cells)]
    if "decode_steps" in (found := report.get("sampler", {})):
        lines += [f"sampler: no decode step waits for the device, {100 * found['equal_tokens']:.1f}% equal tokens"]
    if "ratio" in report.get("trl", {}):
        lines += [f"GRPO step: TRL's time over ours {report['trl']['ratio']['wall']}"]
    return "\n\n".join(lines)


def main(given: list[str] | None = None) -> None:
    """Run the requested parts; print tables and the JSON line."""
    available = "cuda" if torch.cuda.is_available() else "cpu"
    words = arguments({"device": available, "parts": ",".join(PARTS)}, given)
    parts = words["parts"].split(",")
    if wrong := [part for part in parts if part not in PARTS]:
        sys.exit(f"unknown part {wrong[0]!r}; valid: {', '.join(PARTS)}")
    plan = {"cuda": CUDA, "cpu": CPU}[words["device"]]
    name = torch.cuda.get_device_name() if plan.device == "cuda" else "CPU (smoke test; the figures are not meaningful)"
    started = time.perf_counter()
    peak = matrix_peak(plan)
    report: dict[str, Any] = {"benchmark": "gpu", "device": name, **facts()}
    report |= {"dtype": str(plan.dtype).removeprefix("torch."), "peak_tflops": round(peak / 1e12, 4)}
    if "training" in parts:
        report["training"] = []
        for scenario in plan.training:
            found = attempt(lambda scenario=scenario: training(plan, scenario, peak))
            report["training"].append({"model": scenario.name, **found})
            release(plan.device)
    if "rollout" in parts:
        report["rollout"] = attempt(lambda: rollout(plan))
    if "sampler" in parts:
        release(plan.device)
        report["sampler"] = attempt(lambda: sampler(plan))
    if "trl" in parts:
        release(plan.device)  # the two sides run in separate processes
        report["trl"] = attempt(lambda: trl(plan, peak))
    report["seconds"] = round(time.perf_counter() - started, 1)
    print(show(report))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
