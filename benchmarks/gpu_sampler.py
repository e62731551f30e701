"""Check and profile the decode loop of the in-process sampler on a device, for `benchmarks.gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from benchmarks.gpu_plan import synchronize
from realign.api import GenerationConfig, SequenceSample
from realign.engines.training.transformers_engine import TransformersEngine
from realign.samplers.in_process.decode import Rollout


@contextmanager
def watched_steps(device: str) -> Iterator[list[int]]:
    """Raise an error if a decode step waits for the device; yield a list that gets the rows of each step."""
    step, found = Rollout._step, []

    def watched(self: Rollout, **settings: Any) -> None:
        found.append(self.active)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            step(self, **settings)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    with patch.object(Rollout, "_step", watched):
        yield found


@contextmanager
def profiled_steps(device: str, first: int, count: int) -> Iterator[dict[str, float]]:
    """Profile `count` decode steps of the next rollout; yield a dictionary that gets the results.

    They are `launches_per_step` and `device_ms`, the time of the device in a step.
    """
    step, found, number = Rollout._step, {}, 0
    activities = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & supported_activities()
    profiler = profile(activities=activities)

    def profiled(self: Rollout, **settings: Any) -> None:
        nonlocal number
        if number == first:
            synchronize(device)
            profiler.start()
        step(self, **settings)
        number += 1
        if number == first + count:
            synchronize(device)
            profiler.stop()
            events = profiler.events() or []
            launches = sum("LaunchKernel" in event.name or "GraphLaunch" in event.name for event in events)
            busy = sum(event.self_device_time_total for event in events if "CUDA" in str(event.device_type))
            found.update(launches_per_step=round(launches / count, 1), device_ms=round(busy / 1e3 / count, 3))

    with patch.object(Rollout, "_step", profiled):
        yield found


def check_sampler(engine: TransformersEngine, data: SequenceSample, config: GenerationConfig) -> dict[str, Any]:
    """Run rollouts with and without synchronization at every step, and compare them.

    Args:
        engine: an engine with the in-process sampler.
        data: prompts.
        config: sampling settings; responses need different lengths.

    Returns:
        `decode_steps`; `ended_rows`, the fraction of computed rows that had ended; `equal_tokens`, the fraction of
        tokens that do not depend on the synchronization, and the largest `logprob_gap` among them; and
        `allocated_bytes`, which a further rollout allocated and did not free.
    """
    device, samples, rows = engine.device.type, [], []
    for every in (1, 8):
        engine.sampling = replace(engine.sampling, sync_every=every)
        with watched_steps(device) as found:
            samples.append(engine.generate(data, config, seed=0))
        rows.append(sum(found))
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    engine.generate(data, config, seed=1)
    after = torch.cuda.memory_allocated() if device == "cuda" else 0
    pairs = zip(*(zip(x.sequences(), x.sequences("logprobs"), strict=True) for x in samples), strict=True)
    equal, total, gap = 0, 0, 0.0
    for (ids, logprobs), (other_ids, other_logprobs) in pairs:
        n = min(len(ids), len(other_ids))
        same = (ids[:n] == other_ids[:n]).cumprod(0).bool()
        equal, total = equal + int(same.sum()), total + max(len(ids), len(other_ids))
        gap = max(gap, float((logprobs[:n] - other_logprobs[:n])[same].abs().max()))
    return {
        "decode_steps": len(found),
        "ended_rows": round(1 - rows[0] / rows[1], 4),
        "equal_tokens": round(equal / total, 4),
        "logprob_gap": gap,
        "allocated_bytes": after - before,
    }
