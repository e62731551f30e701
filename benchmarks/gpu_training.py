"""Part `training` of `benchmarks.gpu`: GRPO steps of several shapes, their utilization, and their memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.batches import TrainStep, make_actor, make_rollout
from benchmarks.gpu_plan import Plan, attempt, positions, release, timed
from benchmarks.memory import MemoryCount
from benchmarks.peer.work import Scenario
from realign.api.memory import MemoryWork
from realign.engines import OptimizerSpec
from realign.engines.memory import MemoryModel
from realign.models import Causal
from realign.models.model_shape import shape_of
from realign.models.network.kernels import AttentionArgs, Backend, choose_backend
from realign.models.network.settings import NetworkSettings

GIB = 2**30


def matrix_peak(plan: Plan, repeats: int = 10) -> float:
    """Return the FLOP/s of the best of several matrix products."""
    best = 0.0
    for n in plan.matrix:
        a, b = (torch.randn(n, n, device=plan.device, dtype=plan.dtype) for _ in range(2))
        timed(lambda a=a, b=b: a @ b, plan.device)
        seconds = timed(lambda a=a, b=b: [a @ b for _ in range(repeats)], plan.device)
        best = max(best, repeats * 2 * n**3 / seconds)
    return best


def training(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the peak of matrix products, then each shape at the largest budget that fits in memory, and compiled."""
    peak = matrix_peak(plan)
    yield {"peak_tflops": round(peak / 1e12, 4)}
    for scenario in plan.training:
        result = attempt(lambda scenario=scenario: fitting(plan, scenario, peak))
        yield {"model": scenario.name, **result}
        release(plan.device)
        if budget := result.get("microbatch_tokens"):
            network = NetworkSettings(torch_compile=plan.compiler)
            compiled = attempt(partial(_train, plan, scenario, budget, peak, network=network))
            keys = ("step_s", "tokens_per_s", "utilization", "peak_gib", "error")
            told = {key: compiled[key] for key in keys if key in compiled}
            yield {"model": scenario.name, "torch_compile": plan.compiler.value, **told}
            release(plan.device)


def long(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the steps of a peer's baselines: one long sequence per micro-batch, with layers recomputed."""
    for scenario in plan.long:
        step = partial(_train, plan, scenario, positions(scenario), matrix_peak(plan), gradient_checkpointing=True)
        yield {"model": scenario.name, **attempt(step)}
        release(plan.device)


def fitting(plan: Plan, scenario: Scenario, peak: float) -> dict[str, Any]:
    """Measure training steps of one shape, with half the token budget until a micro-batch fits in memory."""
    budget = plan.budget
    while True:
        try:
            return _train(plan, scenario, budget, peak)
        except torch.cuda.OutOfMemoryError:
            if budget < 2 * positions(scenario):
                raise
            budget //= 2
        release(plan.device)


def _train(plan: Plan, scenario: Scenario, budget: int, peak: float, **engine: Any) -> dict[str, Any]:
    config = {"tie_word_embeddings": True, "max_position_embeddings": positions(scenario)}
    actor = make_actor(scenario, device=plan.device, dtype=plan.dtype, config=config, **engine)
    step, batch = TrainStep(actor, scenario), make_rollout(scenario)
    step(batch, budget)
    seconds = statistics.median(timed(lambda: step(batch, budget), plan.device) for _ in range(plan.steps))
    loaded, most = _memory(plan, lambda: step(batch, budget))
    given = [int(mask.sum()) for mask in batch.sequences("prompt_mask")][:: scenario.group]
    flops = scenario.flops(given, scenario.lengths(1))["training"]
    sampled, tokens = int(batch["loss_mask"].sum()), batch.lengths["input_ids"].total
    model = MemoryModel(
        shape_of(scenario.config(**config), Causal()), torch.device(plan.device), plan.dtype, optimizer=OptimizerSpec()
    )
    work = MemoryWork(
        trains=True,
        scores=False,
        samples=False,
        tokens=min(budget, tokens),
        optimizer_step_tokens=tokens,
        prompts=scenario.prompts,
        sequences=scenario.sequences,
        prompt=scenario.prompt_high,
        response=scenario.max_new,
    )
    role = model.estimate(work)
    return {
        "parameters": sum(p.numel() for p in actor.engine.network.parameters()),
        "vocabulary": scenario.vocabulary,
        "microbatch_tokens": budget,
        "tokens": tokens,
        "step_s": round(seconds, 4),
        "tokens_per_s": round(tokens / seconds),
        "tflops": round(flops / seconds / 1e12, 4),
        "utilization": round(flops / seconds / peak, 4),
        "loaded_gib": round(loaded / GIB, 3),
        "peak_gib": round(most / GIB, 3),
        "estimated_peak_gib": round((role.kept + role.training) / GIB, 3),
        "logits_gib": round(4 * min(sampled, budget) * scenario.vocabulary / GIB, 3),
        "attention": attention_backend(plan, scenario),
    }


def attention_backend(plan: Plan, scenario: Scenario) -> str:
    """Return the kernel of packed attention for layers of this shape."""
    size = scenario.hidden // scenario.heads
    q = torch.empty(1, scenario.heads, 1, size, device=plan.device, dtype=plan.dtype)
    return choose_backend(Backend.auto, q, q, AttentionArgs(size**-0.5, 0.0, None, None, None)).value


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
