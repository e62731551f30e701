"""Shapes and settings of `benchmarks.gpu` for each kind of device, and what all its parts use."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.peer.work import SCENARIOS, Scenario
from realign.engines.network.compiled_layers import TorchCompile


@dataclass(frozen=True)
class Plan:
    """Settings of the benchmark for a kind of device."""

    device: str
    dtype: torch.dtype
    matrix: tuple[int, ...]
    """Sizes of the matrix products that measure the peak."""
    training: tuple[Scenario, ...]
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
CUDA = Plan(
    device="cuda",
    dtype=torch.bfloat16,
    matrix=(4096, 8192, 16_384),
    training=(LARGE, replace(LARGE, name="qwen2_1.5b", hidden=1536, layers=28, heads=12, mlp=8960)),
    budget=32_768,
    rollout=replace(LARGE, name="rollout_0.5b", prompts=32, max_new=512, mean_new=128),
    trl=SCENARIOS["gpu"],
    steps=3,
    compiler=TorchCompile.inductor,
)
CPU = Plan(
    device="cpu",
    dtype=torch.bfloat16,
    matrix=(64, 128),
    training=(SCENARIOS["tiny"],),
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


__all__ = ["CPU", "CUDA", "LARGE", "Plan", "attempt", "positions", "release", "synchronize", "timed"]
