"""Sizes of `benchmarks.gpu`, and what all its parts use."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer.work import SCENARIOS, Scenario
from realign.models.network.compiled_layers import TorchCompile


@dataclass(frozen=True)
class Plan:
    """Sizes of the benchmark: `FULL` for a GPU, `TINY` for a smoke test of the same code on any device."""

    device: str
    dtype: torch.dtype
    folder: Path
    """Where results and the files of runs are written."""
    vllm: str
    """Python of an environment with vLLM, or a command that starts a fake server; "" if there is none."""
    attention: tuple[int, ...]
    """Lengths of the packed sequences that compare attention kernels."""
    decode_tokens: int
    """Tokens of the shorter rollout of part `launches`; the longer one has twice as many."""
    llm_steps: int
    matrix: tuple[int, ...]
    """Sizes of the matrix products that measure the peak."""
    training: tuple[Scenario, ...]
    long: tuple[Scenario, ...]
    budget: int
    """Token budget of a micro-batch."""
    rollout: Scenario
    trl: Scenario
    steps: int
    """Number of measured training steps, after one warm-up step."""
    compiler: TorchCompile
    """Backend for training with compiled layers."""


LARGE = Scenario(
    "qwen2_0.5b",
    prompts=24,
    group=8,
    max_new=4096,
    mean_new=512,
    prompt_low=64,
    prompt_high=256,
    vocabulary=151_936,
    hidden=896,
    layers=24,
    heads=14,
    kv_heads=2,
    mlp=4864,
)
SEVEN_B = replace(LARGE, name="qwen2_7b_4_layers", hidden=3584, layers=4, heads=28, kv_heads=4, mlp=18_944)
"""Layers of the 7B shape, but 4 instead of 28: with fp32 weights and moments, all of them fill 122 GB."""
LONG = replace(LARGE, prompts=1, group=2, prompt_low=64, max_new=16_320, mean_new=10**9, hidden=1024, layers=28)
LONG = replace(LONG, name="qwen3_0.6b_16k", prompt_high=64, heads=16, kv_heads=8, head_size=128, mlp=3072)
"""The shape and length of prime-rl's committed baselines (`benchmarks/baselines`, 2026-01): on one H100, RL at 16,384
tokens ran 11.9k tokens/s at 11.1% utilization, at 65,536 tokens 10.1k at 26.8%."""
FULL = Plan(
    device="cuda",
    dtype=torch.bfloat16,
    folder=Path("runs/gpu"),
    vllm="",
    attention=(1, 7, 128, 1000, 4096),
    decode_tokens=64,
    llm_steps=30,
    matrix=(4096, 8192, 16_384),
    training=(LARGE, replace(LARGE, name="qwen2_1.5b", hidden=1536, layers=28, heads=12, mlp=8960), SEVEN_B),
    long=(LONG, replace(LONG, name="qwen3_0.6b_64k", max_new=65_472)),
    budget=32_768,
    rollout=replace(LARGE, name="rollout_0.5b", prompts=32, max_new=512, mean_new=128),
    trl=SCENARIOS["gpu"],
    steps=3,
    compiler=TorchCompile.inductor,
)
TINY = replace(
    FULL,
    attention=(1, 7, 33),
    decode_tokens=4,
    llm_steps=1,
    matrix=(64, 128),
    training=(SCENARIOS["tiny"],),
    long=(replace(SCENARIOS["tiny"], head_size=32),),
    budget=64,
    rollout=SCENARIOS["tiny"],
    trl=SCENARIOS["tiny"],
    steps=1,
    compiler=TorchCompile.eager,
)


def synchronize(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], object], device: str) -> float:
    """Return the seconds of a call, including its work on the device."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def release(device: str) -> None:
    """Free unreferenced memory of the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def positions(scenario: Scenario) -> int:
    """Return the number of positions that a model needs for this scenario."""
    return max(2048, scenario.prompt_high + scenario.max_new)


def attempt(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the results of a part, or its error, so that a failure does not discard the results of other parts."""
    try:
        return part()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
